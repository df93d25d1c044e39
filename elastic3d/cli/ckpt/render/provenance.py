"""The display of what made a checkpoint, and of a configuration that changed from one checkpoint to another."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

from rich.console import Group, RenderableType
from rich.text import Text

from elastic3d.cli.ckpt.documents import ConfigDiffDocument, GenerationSteps, ProvenanceDocument
from elastic3d.cli.ckpt.render.words import count, table
from elastic3d.cli.render import clean
from elastic3d.provenance.code import CodeState
from elastic3d.provenance.comparing import CodeComparison
from elastic3d.provenance.config import flat
from elastic3d.provenance.packages import ALWAYS
from elastic3d.provenance.record import Provenance

LABEL = 13
LISTED = 24
SHORT = 12
MOST = 40
FIRST = ("python", *ALWAYS)


def page(url: str, data: ProvenanceDocument, width: int) -> RenderableType:
    """Return the page of `provenance`."""
    made = data.provenance
    lines: list[RenderableType] = [
        Text(clean(url), style="dim", overflow="fold"),
        Text(data.checkpoint, style="bold"),
        _line("root", data.root),
    ]
    if made is None:
        lines.append(_line("made by", "not said: by an older version, another tool, or without elastic3d.run"))
    else:
        lines += _code(made.code)
        lines.append(_line("packages", _packages(made)))
        if made.model is not None:
            lines.append(_line("model", f"{made.model.architecture}, {made.model.config.get('model_type', '')}"))
    lines.append(_line("data", data.data or "the data set has no fingerprint"))
    seeds = {"data": data.data_seed, "model": None if made is None else made.model_seed}
    lines.append(_line("seeds", ", ".join(f"{name} {seed}" for name, seed in seeds.items() if seed is not None) or "-"))
    if made is not None:
        lines.append(_line("config", f"version {made.config_version}" if made.config is not None else "none was given"))
        lines += _config(made)
    lines += _generations(data.generations)
    lines += [_line("went back", _went_back(one.spike, one.first, one.stop)) for one in data.rollbacks]
    lines += [
        _line("distrusted", f"states of more than {one.step} steps made before generation {one.before} (by the store)")
        for one in data.distrusted
    ]
    if made is not None:
        lines += [
            _line(
                "earlier",
                f"up to step {one.step}: {_version(one.revision, one.code)}, torch {one.torch}, elastic3d "
                f"{one.elastic3d}, config {one.config[:SHORT] or 'none'}",
            )
            for one in made.earlier
        ]
    if data.compared is not None:
        lines += [Text(), *_compared(data.compared)]
    return Group(*lines)


def config_difference(data: ConfigDiffDocument) -> RenderableType:
    """Return the display of `diff --config`."""
    parts: list[RenderableType] = [
        Text.assemble(("- ", "red"), (data.before, "bold"), f"  config {data.before_version[:SHORT] or 'none'}"),
        Text.assemble(("+ ", "green"), (data.after, "bold"), f"  config {data.after_version[:SHORT] or 'none'}"),
    ]
    if not data.changes:
        same = "Both have the same configuration." if data.before_version else "Neither has a configuration."
        return Group(*parts, Text(same, style="green"))
    made = table("key", "before", "after", fold=("key", "before", "after"))
    for one in data.changes:
        made.add_row(*(Text(clean(text) or "-") for text in (one.key, one.before, one.after)))
    return Group(*parts, Text(), made)


def _line(name: str, said: str) -> Text:
    return Text.assemble((f"  {name:<{LABEL - 1}} ", "dim"), clean(said), overflow="fold")


def _code(code: CodeState) -> Iterable[Text]:
    yield _line("script", code.script or "none")
    if code.revision:
        yield _line("git", code.revision)
        changed = f"digest {code.diff}" if code.diff else "none"
        yield _line("changes", f"not known: {code.without}" if code.without else changed)
    else:
        yield _line("git", code.without or "none")
    left_out = f", and {code.left_out} more that are not kept" if code.left_out else ""
    yield _line("files", f"{count(len(code.files), 'file')} imported or changed{left_out}")
    if code.elsewhere:
        yield _line("elsewhere", f"{', '.join(code.elsewhere)}: modules of no distribution, which are not kept")


def _packages(made: Provenance) -> str:
    left_out = f", and {made.packages_left_out} more" if made.packages_left_out else ""
    first = sorted(made.packages.items(), key=lambda one: (one[0] not in FIRST, one[0].lower()))
    return ", ".join(f"{name} {version}" for name, version in first) + left_out


def _config(made: Provenance) -> list[Text]:
    values = flat(made.config or {}) if made.config else ()
    lines = [Text.assemble("    ", (clean(key), "dim"), f" {clean(text)}", overflow="fold") for key, text in values]
    if len(lines) > MOST:
        lines[MOST:] = [Text(f"    and {len(lines) - MOST} more (--json)", style="dim")]
    return lines


def _generations(lines: Sequence[GenerationSteps]) -> list[RenderableType]:
    """Draw which generation made which steps; steps that one made in a row are one line of the ledger already."""
    if not lines:
        return []
    excluded = any(line.excluded for line in lines)
    changed = any(line.changed for line in lines)
    columns = ["generation", "steps", "layout", *(["left out"] if excluded else []), *(["changed"] if changed else [])]
    made = table(*columns, right=("generation", "left out"), fold=("layout", "changed"))
    for line in lines[-LISTED:]:
        cells = {
            "generation": str(line.generation),
            "steps": f"{line.first_step} to {line.stop_step}",
            "layout": clean(line.layout),
            "left out": count(line.excluded, "sample") if line.excluded else "",
            "changed": clean(line.changed),
        }
        made.add_row(*(Text(cells[column]) for column in columns))
    number = sum(1 for _ in groupby(lines, key=lambda line: line.generation))
    title = f"made by {count(number, 'generation')}"
    if len(lines) > LISTED:
        title += f" (the last {LISTED} of {len(lines)} lines; --json has all)"
    return [Text(), Text(title, style="bold"), made, Text()]


def _went_back(spike: int, first: int, stop: int) -> str:
    return f"the loss jumped up in step {spike}: positions {first} to {stop - 1} are left out"


def _version(revision: str, code: str) -> str:
    return f"git {revision[:SHORT]}, code {code[:SHORT]}" if revision else f"code {code[:SHORT]}"


def _compared(compared: CodeComparison) -> Iterable[RenderableType]:
    what = f"{count(compared.files, 'file')} of {compared.folder}"
    if not compared.differences:
        yield Text(
            f"{clean(what)} are those that made it." if compared.files != 1 else f"{clean(what)} made it.",
            style="green",
        )
    else:
        yield Text(f"{clean(what)} compared: {count(len(compared.differences), 'difference')}", style="bold red")
        made = table("what", "saved", "here", fold=("what", "saved", "here"))
        for one in compared.differences[:LISTED]:
            made.add_row(*(Text(clean(text)) for text in (one.what, one.saved, one.here)))
        yield made
        if len(compared.differences) > LISTED:
            yield Text(f"and {len(compared.differences) - LISTED} more (--json)", style="dim")
    if compared.without:
        yield Text(f"Revisions were not compared: {clean(compared.without)}.", style="yellow")
    if compared.left_out:
        yield Text(f"{count(compared.left_out, 'file')} more could not be compared.", style="yellow")

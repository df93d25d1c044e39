"""One checkpoint: a page about it, its names as a tree, its statistics."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text
from rich.tree import Tree

from checkpointing.inspection.alike import gathered
from checkpointing.inspection.statistics import TensorStatistics, together
from checkpointing.inspection.summary import Share, Summary, generations
from checkpointing.inspection.tree import Node
from checkpointing.inspection.writers import Writers
from elastic3d.cli.ckpt.render.words import (
    NARROW,
    count,
    marks,
    number,
    percent,
    shape,
    size,
    table,
    when,
)
from elastic3d.cli.render import clean

STAGES = 16
LABEL = 11


def summary(url: str, summarised: Summary, width: int, *, all_facts: bool = False) -> RenderableType:
    """Return the page of `show`."""
    head = Text.assemble((summarised.checkpoint, "bold"), "  ").append_text(marks(summarised.labels))
    lines: list[RenderableType] = [
        Text(clean(url), style="dim", overflow="fold"),
        head,
        _line("step", f"{summarised.step}" + (f", attempt {summarised.attempt}" if summarised.attempt else "")),
        _line("generation", _generations(summarised)),
        _line("written", when(summarised.modified)),
        _line("root", summarised.root if width >= LABEL + len(summarised.root) else f"{summarised.root[:16]}..."),
        _line(
            "holds",
            f"{count(summarised.tensors, 'tensor')}, {size(summarised.bytes)} in {count(summarised.tiles, 'tile')}",
        ),
        _line(
            "dtypes",
            ", ".join(f"{name} {percent(s.bytes, summarised.bytes)}" for name, s in summarised.dtypes.items()) or "-",
        ),
        _line("stored", _stored(summarised)),
    ]
    if kept := _kept(summarised.facts):
        lines.append(_line("extra", kept))
    lines += [_line("parents", _lineage(summarised)), Text(), *_mesh(summarised.writers, width)]
    if summarised.facts:
        lines += [Text(), *_facts(summarised.facts, width, all_facts=all_facts)]
    return Group(*lines)


def _line(name: str, said: str) -> Text:
    return Text.assemble((f"  {name:<{LABEL - 1}} ", "dim"), clean(said), overflow="fold")


def _generations(summarised: Summary) -> str:
    if summarised.made_in == summarised.committed_in:
        return f"made and committed in {summarised.made_in}"
    return f"made in {summarised.made_in}, committed in {summarised.committed_in}: its makers were gone by then"


def _stored(summarised: Summary) -> str:
    said = f"{size(summarised.stored)} in {count(summarised.packs, 'pack')} of {size(summarised.pack_bytes)}"
    codecs = ", ".join(f"{name} {_codec(name, share, summarised)}" for name, share in summarised.codecs.items())
    return f"{said}; {codecs}" if codecs else said


def _codec(name: str, share: Share, summarised: Summary) -> str:
    part = percent(share.bytes, summarised.bytes)
    return part if name == "raw" or not share.stored else f"{part} ({share.bytes / share.stored:.2f} times smaller)"


def _lineage(summarised: Summary) -> str:
    if not summarised.lineage:
        return "none: everything was written anew"
    shown = []
    for ancestor in summarised.lineage:
        step, made_in, _ = generations(ancestor.checkpoint)
        said = f"step {step}" + (f" (generation {made_in})" if made_in != summarised.made_in else "")
        shown.append(said if ancestor.there else f"{said}, collected since")
    return " <- ".join(shown)


def _mesh(writers: Writers, width: int) -> list[RenderableType]:
    """Draw how much each rank saved: a row for each stage, a column for each rank in it."""
    ranks = {holding.rank: holding for holding in writers.ranks}
    columns = max(len(stage) for stage in writers.stages)
    cuts = ", ".join(f"dim {dim} cut in {parts}" for dim, parts in writers.cuts.items()) or "tensors whole"
    said = f"written by {count(len(writers.ranks), 'rank')}: "
    if writers.regular:
        said += f"{count(len(writers.stages), 'stage')} x {columns}, {cuts}"
    else:
        said += f"{count(len(writers.stages), 'group')} that hold the same tensors, {cuts}"
    largest = max(len(f"rank {holding.rank} {size(holding.bytes)}") for holding in writers.ranks)
    fit = max(1, min(columns, (width - 12) // (largest + 2)))
    row_name = "pp" if writers.regular else "group"
    made = table("", *(str(column) for column in range(fit)), right=())
    for place, stage in enumerate(writers.stages[:STAGES]):
        cells = [Text.assemble(f"rank {rank} ", (size(ranks[rank].bytes), "dim")) for rank in stage[:fit]]
        made.add_row(Text(f"  {row_name} {place}", style="dim"), *cells)
    made.show_header = False
    left_out = []
    if columns > fit:
        left_out.append(f"{count(columns - fit, 'more rank')} in each")
    if len(writers.stages) > STAGES:
        left_out.append(count(len(writers.stages) - STAGES, "more stage"))
    note = [Text(f"  and {', '.join(left_out)}", style="dim")] if left_out else []
    return [Text(said, style="bold"), made, *note]


def _facts(facts: Mapping[str, Any], width: int, *, all_facts: bool) -> list[RenderableType]:
    lines: list[RenderableType] = [Text("facts", style="bold")]
    if all_facts:
        return [*lines, Text(json.dumps(facts, indent=2, ensure_ascii=False))]
    for name, value in facts.items():
        text = json.dumps(value, ensure_ascii=False)
        if len(name) + len(text) + 4 > width:
            counted = isinstance(value, dict | list)
            text = _counted(value) if counted else text[: max(8, width - len(name) - 10)] + "..."
        lines.append(Text.assemble("  ", (clean(name), "dim"), f" {clean(text)}", overflow="fold"))
    return lines


def _kept(facts: Mapping[str, Any]) -> str:
    """Return what a script has kept of its own, with the classes, "" for nothing."""
    extra = facts.get("extra")
    if not isinstance(extra, dict) or not all(isinstance(one, dict) for one in extra.values()):
        return ""
    return ", ".join(f"{name} ({one.get('kind', '?')})" for name, one in extra.items())


def _counted(value: dict[str, Any] | list[Any]) -> str:
    one, several = ("field", "fields") if isinstance(value, dict) else ("entry", "entries")
    return f"{len(value)} {one if len(value) == 1 else several} (--facts)"


def names(checkpoint: str, nodes: Sequence[Node], width: int, *, depth: int) -> RenderableType:
    """Return the tree of `tree`."""
    tensors, nbytes = sum(node.tensors for node in nodes), sum(node.bytes for node in nodes)
    top = Tree(Text.assemble((checkpoint, "bold"), f"  {size(nbytes)}, {count(tensors, 'tensor')}"), guide_style="dim")
    for node in nodes:
        _grow(top, node, depth - 1, nbytes)
    return top


def _grow(above: Tree, node: Node, depth: int, whole: int) -> None:
    if node.spec is not None and not node.children:
        what = f"{node.spec.dtype} {shape(node.spec.shape)}"
        each = f", {node.alike} times" if node.alike > 1 else ""
        above.add(Text.assemble(clean(node.name), (f"  {what}  {size(node.bytes)}{each}", "dim")))
        return
    share = percent(node.bytes, whole)
    each = f", each {size(node.bytes // node.alike)}" if node.alike > 1 else ""
    said = f"  {size(node.bytes)} ({share}), {count(node.tensors, 'tensor')}{each}"
    branch = above.add(Text.assemble((clean(node.name), "bold blue"), (said, "dim")))
    if depth > 0:
        for child in node.children:
            _grow(branch, child, depth - 1, whole)


def statistics(
    checkpoint: str, rows: Sequence[TensorStatistics], width: int, *, bad: bool, number_of: int, each: bool
) -> RenderableType:
    """Return the table of `stats`, at most `number_of` lines; repeated blocks are one line unless `each`."""
    if not rows:
        said = "has no NaN and no infinity" if bad else "has no tensors"
        return Text(f"{checkpoint} {said}, as far as statistics tell.", style="green" if bad else "", overflow="fold")
    columns = ["tensor", "min", "max", "rms", "nan"]
    if width >= NARROW:
        columns[1:1] = ["dtype", "shape"]
    made = table(*columns, right=("min", "max", "rms", "nan"), fold=("tensor", "shape"))
    by_key = {row.spec.key: row for row in rows}
    common = ((row.spec.key, row.spec.key if each else (row.spec.dtype, row.spec.shape, row.sound)) for row in rows)
    lines = gathered(common)
    for name, keys in lines[:number_of]:
        row = together(by_key[key] for key in keys)
        style = "" if row.sound else "bold red"
        cells: dict[str, RenderableType] = {
            "tensor": Text(clean(name), style=style),
            "dtype": Text(row.spec.dtype, style="dim"),
            "shape": Text(shape(row.spec.shape), style="dim"),
            "min": number(row.min),
            "max": number(row.max),
            "rms": number(row.rms),
            "nan": Text(f"{row.nans:,}" if row.known else "-", style=style if row.nans else ""),
        }
        made.add_row(*(cells[column] for column in columns))
    more = len(lines) - number_of
    foot = [Text(f"and {count(more, 'more line')}", style="dim")] if more > 0 else []
    return Group(Text(checkpoint, style="bold"), made, *foot)

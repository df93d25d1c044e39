"""Displays of whole stores: their checkpoints, their history, the space they take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.text import Text

from checkpointing.inspection.history import Commit
from checkpointing.inspection.usage import StoreUsage
from elastic3d.cli.ckpt.render.words import NARROW, WIDE, count, marks, percent, size, step, table, when
from elastic3d.cli.render import clean


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRow:
    """One committed checkpoint as `ls` lists it. error: why its record cannot be read, "" if it can."""

    checkpoint: str
    labels: tuple[str, ...] = ()
    latest: bool = False
    step: int = 0
    made_in: int = 0
    committed_in: int = 0
    ranks: int = 0
    tensors: int = 0
    tiles: int = 0
    bytes: int = 0
    root: str = ""
    modified: float = 0.0
    error: str = ""


def checkpoints(url: str, generation: int | None, rows: Sequence[CheckpointRow], width: int) -> RenderableType:
    """Return the list of `ls`."""
    if not rows:
        fence = "" if generation is None else f"; generation {generation} may commit"
        return Text(f"No checkpoints in {clean(url)}{fence}.", overflow="fold")
    columns = ["step", "labels", "size"]
    if width >= NARROW:
        columns = ["step", "labels", "written", "size", "made in", "committed in"]
    if width >= WIDE:
        columns[4:] = ["ranks", "tensors", "checkpoint"]
    made = table(*columns, right=("step", "size", "made in", "committed in", "ranks", "tensors"), fold=("labels",))
    for row in rows:
        broken = Text("unreadable", style="bold red")
        cells: dict[str, RenderableType] = {
            "step": step(row.checkpoint),
            "labels": Text(" ").join([broken, marks(row.labels)]) if row.error else marks(row.labels),
            "written": when(row.modified),
            "size": "?" if row.error else size(row.bytes),
            "made in": "?" if row.error else str(row.made_in),
            "committed in": "?" if row.error else str(row.committed_in),
            "ranks": "?" if row.error else str(row.ranks),
            "tensors": "?" if row.error else str(row.tensors),
            "checkpoint": row.checkpoint,
        }
        made.add_row(*(cells[column] for column in columns))
    foot = Text(f"{count(len(rows), 'checkpoint')}; generation {generation} may commit", style="dim")
    wrong = [Text(clean(f"{row.checkpoint}: {row.error}"), style="red") for row in rows if row.error]
    return Group(Text(clean(url), style="bold", overflow="fold"), made, foot, *wrong)


def commits(
    url: str, history: Sequence[Commit], labels: Mapping[str, Sequence[str]], more: int, width: int
) -> RenderableType:
    """Return the lines of `log`."""
    if not history:
        return Text(f"No commits in {clean(url)}.", overflow="fold")
    columns = ["step", "changed", "written"]
    if width >= NARROW:
        columns = ["step", "when", "generation", "changed", "written", "kept", ""]
    if width >= WIDE:
        columns[3:3] = ["ranks", "size"]
        columns[-1:] = ["tensors", ""]
    made = table(
        *columns, right=("step", "generation", "ranks", "size", "changed", "written", "kept", "tensors"), fold=("",)
    )
    for commit in history:
        if commit.error:
            said = Text(clean(commit.error) if width >= NARROW else "unreadable", style="red")
            made.add_row(step(commit.checkpoint), *([""] * (len(columns) - 2)), said)
            continue
        same = commit.made_in == commit.committed_in
        cells: dict[str, RenderableType] = {
            "step": str(commit.step),
            "when": when(commit.modified),
            "generation": str(commit.made_in) if same else f"{commit.made_in} by {commit.committed_in}",
            "ranks": str(commit.ranks),
            "size": size(commit.bytes),
            "changed": _changed(commit),
            "written": size(commit.written),
            "kept": size(commit.kept) if commit.kept else "-",
            "tensors": _tensors(commit),
            "": marks(labels.get(commit.checkpoint, ())),
        }
        made.add_row(*(cells[column] for column in columns))
    foot = [Text(f"and {count(more, 'older commit')}; -n shows more", style="dim")] if more else []
    return Group(Text(clean(url), style="bold", overflow="fold"), made, *foot)


def _changed(commit: Commit) -> str:
    if commit.changed is None:
        return "-"
    return "recut" if commit.recut else percent(commit.changed, commit.bytes)


def _tensors(commit: Commit) -> Text:
    text = Text(str(commit.tensors))
    if commit.added:
        text.append(f" +{commit.added}", style="green")
    if commit.removed:
        text.append(f" -{commit.removed}", style="red")
    return text


def usage(url: str, used: StoreUsage, labels: Mapping[str, Sequence[str]], width: int) -> RenderableType:
    """Return the table of `du`, and totals of the store."""
    parts: list[RenderableType] = [Text(clean(url), style="bold", overflow="fold")]
    if used.checkpoints:
        columns = ["step", "size", "unique", "frees"]
        if width >= NARROW:
            columns = ["step", "size", "stored", "unique", "shared", "frees", ""]
        made = table(*columns, right=columns[:-1] if "" in columns else columns, fold=("",))
        for row in used.checkpoints:
            cells: dict[str, RenderableType] = {
                "step": str(row.step),
                "size": size(row.size),
                "stored": size(row.stored),
                "unique": size(row.unique),
                "shared": size(row.shared),
                "frees": size(row.frees),
                "": marks(labels.get(row.checkpoint, ())),
            }
            made.add_row(*(cells[column] for column in columns))
        parts += [made, Text()]
    whole = used.packs + used.documents + used.other
    parts.append(Text(f"{size(whole)} in {count(used.objects, 'object')}", style="bold"))
    parts.append(Text(f"  {size(used.packs)} packs, {size(used.documents)} documents, {size(used.other)} other"))
    apparent = sum(row.size for row in used.checkpoints)
    if apparent and used.packs > used.unreferenced:
        parts.append(
            Text(f"  {size(apparent)} of tensors in {count(len(used.checkpoints), 'checkpoint')} are kept in "
                 f"{size(used.packs - used.unreferenced)}")
        )  # fmt: skip
    if used.unreferenced_packs:
        parts.append(
            Text(
                f"  {size(used.unreferenced)} in {count(used.unreferenced_packs, 'pack')} that no checkpoint needs: "
                "garbage, or a save under way",
                style="yellow",
            )
        )
    if used.missing:
        parts.append(Text(f"  {count(used.missing, 'pack')} missing: see elastic3d ckpt verify", style="bold red"))
    return Group(*parts)

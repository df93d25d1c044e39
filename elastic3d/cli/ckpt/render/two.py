"""Displays of two things: two checkpoints, or a checkpoint and the mesh that would restore it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.text import Text

from checkpointing.inspection.alike import gathered
from checkpointing.inspection.difference import Change, Difference, TensorDifference, merged
from checkpointing.inspection.documents import CheckpointDocuments
from checkpointing.inspection.reads import Reads
from checkpointing.inspection.values import ValueDifference
from checkpointing.inspection.values import merged as merged_values
from elastic3d.cli.ckpt.render.tensor_words import SIGN, amount, changed, common, counted, respecified, rms
from elastic3d.cli.ckpt.render.words import NARROW, WIDE, count, number, percent, signed, size, table
from elastic3d.cli.render import clean
from elastic3d.planner.placement import RankPlace
from elastic3d.planner.shares import Homes, MeshSizes

LISTED = 24
FACTS = 12

_STYLE = {
    Change.CHANGED: "yellow",
    Change.RECUT: "dim",
    Change.RESHAPED: "bold red",
    Change.ADDED: "green",
    Change.REMOVED: "red",
}


def difference(
    changes: Difference, distances: Mapping[str, ValueDifference], width: int, *, each: bool = False
) -> RenderableType:
    """Return the display of `diff`, with exact distances if values were read."""
    parts: list[RenderableType] = [
        Text.assemble(("- ", "red"), (changes.before, "bold")),
        Text.assemble(("+ ", "green"), (changes.after, "bold")),
    ]
    if changes.same:
        return Group(*parts, Text("Tensors and facts are the same: both have one root.", style="green"))
    differing = [one for one in changes.tensors if one.change is not Change.SAME]
    if differing:
        parts += [Text(), _tensors(differing, distances, width, each=each)]
    parts += [Text(), _total(changes, distances)]
    for fact in changes.facts[:FACTS]:
        before, after = (json.dumps(value, ensure_ascii=False) for value in (fact.before, fact.after))
        room = max(8, (width - len(fact.path) - 12) // 2)
        before, after = (text if len(text) <= room else f"{text[: room - 3]}..." for text in (before, after))
        parts.append(Text.assemble(("  fact ", "dim"), clean(fact.path), f": {clean(before)} -> {clean(after)}"))
    if len(changes.facts) > FACTS:
        parts.append(Text(f"  and {count(len(changes.facts) - FACTS, 'more fact')} (--json)", style="dim"))
    return Group(*parts)


def _tensors(
    differing: Sequence[TensorDifference], distances: Mapping[str, ValueDifference], width: int, *, each: bool
) -> RenderableType:
    columns = ["", "tensor", "changed", "rms"]
    if width >= NARROW:
        columns = ["", "tensor", "size", "changed", "tiles", "rms", "drift"]
    if distances and width >= NARROW:
        columns = ["", "tensor", "size", "changed", "max |d|", "rms d"]
        if width >= WIDE:
            columns[4:4] = ["tiles", "elements", "rms"]
    elif distances:
        columns[-1] = "max |d|"
    made = table(*columns, right=columns[2:], fold=("tensor",))
    by_key = {one.key: one for one in differing}
    for name, keys in gathered((one.key, one.key if each else common(one)) for one in differing):
        one = merged(list(map(by_key.__getitem__, keys)))
        style = _STYLE[one.change]
        exact = merged_values([distances[key] for key in keys]) if one.key in distances else None
        cells: dict[str, RenderableType] = {
            "": Text(SIGN[one.change], style=style),
            "tensor": Text(clean(name) + respecified(one), style=style),
            "size": size(one.bytes),
            "changed": changed(one),
            "tiles": f"{one.changed_tiles}/{one.tiles}" if one.change is Change.CHANGED and one.changed_tiles else "-",
            "rms": rms(one),
            "drift": signed(one.drift),
            "elements": percent(exact.elements, exact.total) if exact else "-",
            "max |d|": number(exact.max_abs) if exact else "-",
            "rms d": number(exact.rms) if exact else "-",
        }
        made.add_row(*(cells[column] for column in columns))
    return made


def _total(changes: Difference, distances: Mapping[str, ValueDifference]) -> Text:
    text = Text(counted(changes), style="bold")
    unsure = bool(changes.unknown) and not distances
    text.append(f"; {amount(changes, unsure=unsure)}")
    if unsure:
        text.append(f", {size(changes.unknown)} cut elsewhere: --values tells", style="dim")
    return text


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadingRanks:
    """Ranks that read together, their places on the axes, and what they read."""

    ranks: tuple[int, ...]
    places: tuple[RankPlace, ...]
    reads: Reads


def plan(
    documents: CheckpointDocuments, target: MeshSizes, homes: Homes, readers: Sequence[ReadingRanks], width: int
) -> RenderableType:
    """Return the display of `plan`."""
    parts: list[RenderableType] = [
        Text.assemble((documents.name, "bold"), f" to {target}: {count(target.world, 'rank')}"),
        *_assumed(target, homes),
        Text(),
    ]
    together = len(readers[0].ranks) > 1
    columns = ["rank", "needs", "reads", "over-read"]
    if width >= NARROW:
        columns = ["rank", "place", "needs", "reads", "over-read", "tiles", "requests", "packs"]
    if together:
        columns = ["node", *(column for column in columns if column != "place")]
    made = table(*columns, right=[column for column in columns if column != "place"])
    listed = list(readers) if len(readers) <= LISTED else _worst(readers)
    for reader in listed:
        reads = reader.reads
        first = reader.places[0]
        cells = {
            "node": str(reader.ranks[0] // len(reader.ranks)),
            "rank": f"{reader.ranks[0]}-{reader.ranks[-1]}" if together else str(reader.ranks[0]),
            "place": f"pp {first.pp} dp {first.dp} tp {first.tp}",
            "needs": size(reads.needed),
            "reads": size(reads.read),
            "over-read": over(reads.over_read),
            "tiles": f"{reads.tiles:,}",
            "requests": f"{reads.requests:,}",
            "packs": f"{reads.packs:,}",
        }
        made.add_row(*(cells[column] for column in columns))
    parts.append(made)
    if len(listed) < len(readers):
        rest = len(readers) - len(listed)
        parts.append(Text(f"and {rest:,} more that read no more than these (--json lists them all)", style="dim"))
    needed, read = (sum(getattr(one.reads, field) for one in readers) for field in ("needed", "read"))
    requests = sum(one.reads.requests for one in readers)
    said = f"together {size(read)} in {count(requests, 'request')} for {size(needed)}: {over(_ratio(read, needed))}"
    parts += [Text(), Text(said, style="bold")]
    return Group(*parts)


def over(ratio: float | None) -> str:
    """Return bytes read for each byte needed, as a factor."""
    return "-" if ratio is None else f"{ratio:.2f} x"


def _ratio(read: int, needed: int) -> float | None:
    return read / needed if needed else None


def _worst(readers: Sequence[ReadingRanks]) -> list[ReadingRanks]:
    worst = sorted(readers, key=lambda reader: (-reader.reads.read, reader.ranks))[:LISTED]
    return sorted(worst, key=lambda reader: reader.ranks)


def _assumed(target: MeshSizes, homes: Homes) -> list[Text]:
    if target.pp == 1:
        return []
    if not homes.blocks:
        return [
            Text("  no numbered blocks to cut stages from: all tensors are cut evenly over all ranks", style="yellow")
        ]
    lines = [Text(f"  stages are cut between the {homes.count} of {homes.blocks!r}", style="dim")]
    if homes.guessed:
        shown = ", ".join(sorted(homes.guessed)[:3]) + (", ..." if len(homes.guessed) > 3 else "")
        lines.append(
            Text(
                f"  {count(len(homes.guessed), 'tensor')} outside of them counted to the first stage ({clean(shown)}); "
                "--last names those of the last",
                style="yellow",
                overflow="fold",
            )
        )
    return lines

"""What changed between two checkpoints, from digests and statistics alone.

Tiles of the same box are equal if and only if their digests are. If ranks cut a tensor at other places there may be no
such tiles to compare: statistics then still show how far the values moved on the whole, and the values show the rest
(`checkpointing.inspection.values`).
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from checkpointing.format.manifest import StoredTile
from checkpointing.format.tiles import Box, TensorSpec
from checkpointing.inspection.documents import CheckpointDocuments
from checkpointing.inspection.statistics import TensorStatistics, summarise, together

# Tiles' statistics have six digits: values that moved less than that may not have moved at all.
_ROUNDED = 1e-5


class Change(StrEnum):
    """What happened to a tensor."""

    SAME = "same"
    CHANGED = "changed"
    RECUT = "recut"
    """Cut at other places, and no comparable part differs: only values can tell."""
    RESHAPED = "reshaped"
    ADDED = "added"
    REMOVED = "removed"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDifference:
    """One tensor in two checkpoints; sizes are of the later one, of the earlier one if it was removed.

    changed: bytes in tiles whose digests differ. unknown: bytes in tiles that the other checkpoint cut elsewhere.
    drift: how far the root of the mean square moved, relative to before; None if statistics do not tell.
    """

    key: str
    change: Change
    before: TensorSpec | None
    after: TensorSpec | None
    tiles: int = 0
    changed_tiles: int = 0
    bytes: int = 0
    changed: int = 0
    unknown: int = 0
    stats_before: TensorStatistics | None = None
    stats_after: TensorStatistics | None = None

    @property
    def drift(self) -> float | None:
        """Relative move of the root mean square."""
        if self.stats_before is None or self.stats_after is None:
            return None
        one, other = self.stats_before.rms, self.stats_after.rms
        if one is None or other is None or not math.isfinite(one) or not math.isfinite(other):
            return None
        if math.isclose(one, other, rel_tol=_ROUNDED):
            return 0.0
        return (other - one) / one if one else math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class FactDifference:
    """A fact that differs, by its path; None on the side that does not have it."""

    path: str
    before: Any
    after: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A comparison of two checkpoints. same: whether all tensors and facts are equal, by their roots."""

    before: str
    after: str
    same: bool
    tensors: tuple[TensorDifference, ...]
    facts: tuple[FactDifference, ...]

    @property
    def bytes(self) -> int:
        """Bytes of the later checkpoint's tensors."""
        return sum(one.bytes for one in self.tensors if one.after is not None)

    @property
    def changed(self) -> int:
        """Bytes of the later checkpoint that differ or are new."""
        return sum(one.changed for one in self.tensors if one.after is not None)

    @property
    def unknown(self) -> int:
        """Bytes that digests cannot compare."""
        return sum(one.unknown for one in self.tensors)


def difference(before: CheckpointDocuments, after: CheckpointDocuments) -> Difference:
    """Return what changed from one checkpoint to another, of the same store or not."""
    old, new = by_key(before.tiles), by_key(after.tiles)
    tensors = []
    for key in sorted(before.specs.keys() | after.specs.keys()):
        one, other = before.specs.get(key), after.specs.get(key)
        tensors.append(_tensor(key, one, other, old.get(key, []), new.get(key, [])))
    return Difference(
        before=before.name,
        after=after.name,
        same=before.record.root == after.record.root,
        tensors=tuple(tensors),
        facts=tuple(_facts("", before.record.facts, after.record.facts)),
    )


def by_key(tiles: Iterable[StoredTile]) -> dict[str, list[StoredTile]]:
    """Return tiles by the key of their tensor."""
    grouped: dict[str, list[StoredTile]] = defaultdict(list)
    for tile in tiles:
        grouped[tile.spec.key].append(tile)
    return grouped


def _tensor(
    key: str,
    before: TensorSpec | None,
    after: TensorSpec | None,
    old: list[StoredTile],
    new: list[StoredTile],
) -> TensorDifference:
    stats_before = summarise(before, old) if before is not None else None
    stats_after = summarise(after, new) if after is not None else None
    shown = after if after is not None else before
    assert shown is not None
    nbytes = shown.box.numel * shown.itemsize
    count = len(new) if after is not None else len(old)
    unknown = 0
    if before is not None and after is not None and before == after:
        boxes = {tile.box: tile.digest for tile in old}
        differing = [tile for tile in new if boxes.get(tile.box, tile.digest) != tile.digest]
        unknown = sum(tile.nbytes for tile in new if tile.box not in boxes)
        changed_tiles, changed = len(differing), sum(tile.nbytes for tile in differing)
        if not changed_tiles and unknown and _comparable(stats_before) != _comparable(stats_after):
            # Statistics can tell that values differ, never that they do not.
            change = Change.CHANGED
        else:
            change = Change.CHANGED if changed_tiles else Change.RECUT if unknown else Change.SAME
    else:
        changed_tiles, changed = count, nbytes
        change = Change.ADDED if before is None else Change.REMOVED if after is None else Change.RESHAPED
    return TensorDifference(
        key=key,
        change=change,
        before=before,
        after=after,
        tiles=count,
        changed_tiles=changed_tiles,
        bytes=nbytes,
        changed=changed,
        unknown=unknown,
        stats_before=stats_before,
        stats_after=stats_after,
    )


def _comparable(stats: TensorStatistics | None) -> tuple[object, ...]:
    """Return the statistics that do not depend on where a tensor was cut; a rounded mean does, in its last digit."""
    return () if stats is None else (stats.min, stats.max, stats.nans)


def _facts(path: str, before: Any, after: Any) -> Iterable[FactDifference]:
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for key in sorted(before.keys() | after.keys()):
            inner = f"{path}.{key}" if path else str(key)
            yield from _facts(inner, before.get(key), after.get(key))
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for number, (one, other) in enumerate(zip(before, after, strict=True)):
            yield from _facts(f"{path}[{number}]", one, other)
    elif before != after:
        yield FactDifference(path=path, before=before, after=after)


def regions(before: Iterable[StoredTile], after: Iterable[StoredTile]) -> list[Box]:
    """Return the later boxes of one tensor that are not known to hold the same values as before."""
    known = {(tile.box, tile.digest) for tile in before}
    return [tile.box for tile in after if (tile.box, tile.digest) not in known]


def merged(several: Sequence[TensorDifference]) -> TensorDifference:
    """Return the difference of several tensors to which the same happened as if they were one."""
    before = [one.stats_before for one in several if one.stats_before is not None]
    after = [one.stats_after for one in several if one.stats_after is not None]
    return dataclasses.replace(
        several[0],
        tiles=sum(one.tiles for one in several),
        changed_tiles=sum(one.changed_tiles for one in several),
        bytes=sum(one.bytes for one in several),
        changed=sum(one.changed for one in several),
        unknown=sum(one.unknown for one in several),
        stats_before=together(before) if before else None,
        stats_after=together(after) if after else None,
    )

"""The mesh that wrote a checkpoint, derived from what each rank holds.

No layout is written down: the root of a state is the same under any layout. But manifests say which rank saved which
box. Ranks that hold parts of one tensor belong to one stage, and so do ranks that hold the same tensors; the dims that
are cut show how many ways they are cut.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from checkpointing.format.manifest import RankManifest
from checkpointing.format.tiles import Box, TensorSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """What one rank saved: tensors and bytes."""

    rank: int
    tensors: int
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Writers:
    """The writers of a checkpoint. stages: ranks by stage, first stage first. cuts: number of parts by dim.

    regular: whether all stages have equally many ranks, and each stage's are neighbours, as in a mesh. replicated: keys
    that several ranks of one stage hold whole while their other tensors are cut.
    """

    ranks: tuple[Holding, ...]
    stages: tuple[tuple[int, ...], ...]
    cuts: dict[int, int]
    regular: bool
    replicated: tuple[str, ...]


def writers(manifests: Sequence[RankManifest]) -> Writers:
    """Return the writers of one checkpoint's manifests, which are in order of rank."""
    held = [_bounds(manifest) for manifest in manifests]
    parts: dict[str, set[tuple[int, Box]]] = defaultdict(set)
    specs: dict[str, TensorSpec] = {}
    for manifest, boxes in zip(manifests, held, strict=True):
        for spec, box in boxes.values():
            specs[spec.key] = spec
            parts[spec.key].add((manifest.rank, box))
    groups = _Groups(len(manifests))
    cuts: dict[int, int] = {}
    for key, holders in parts.items():
        if any(box != specs[key].box for _, box in holders):
            groups.join([rank for rank, _ in holders])
            for dim in range(len(specs[key].shape)):
                count = len({(box.start[dim], box.stop[dim]) for _, box in holders})
                if count > 1:
                    cuts[dim] = max(count, cuts.get(dim, 1))
    same: dict[frozenset[str], list[int]] = defaultdict(list)
    for manifest, boxes in zip(manifests, held, strict=True):
        if boxes:
            same[frozenset(boxes)].append(manifest.rank)
    for ranks in same.values():
        groups.join(ranks)
    stages = groups.sorted()
    width = len(stages[0])
    whole = [key for key, holders in parts.items() if all(box == specs[key].box for _, box in holders)]
    stage_of = {rank: number for number, stage in enumerate(stages) for rank in stage}
    replicated = {
        key for key in whole if len(parts[key]) > len({stage_of[rank] for rank, _ in parts[key]}) and specs[key].shape
    }
    return Writers(
        ranks=tuple(
            Holding(
                rank=manifest.rank,
                tensors=len(boxes),
                bytes=sum(tile.nbytes for tile in manifest.tiles),
            )
            for manifest, boxes in zip(manifests, held, strict=True)
        ),
        stages=stages,
        cuts=dict(sorted(cuts.items())),
        regular=all(len(stage) == width and stage[-1] - stage[0] == width - 1 for stage in stages),
        replicated=tuple(sorted(replicated)) if cuts else (),
    )


def _bounds(manifest: RankManifest) -> dict[str, tuple[TensorSpec, Box]]:
    """Return the box that a rank's tiles of each tensor span."""
    bounds: dict[str, tuple[TensorSpec, Box]] = {}
    for tile in manifest.tiles:
        known = bounds.get(tile.spec.key)
        box = tile.box
        if known is not None:
            start = tuple(map(min, known[1].start, box.start))
            stop = tuple(map(max, known[1].stop, box.stop))
            box = Box(start=start, stop=stop)
        bounds[tile.spec.key] = (tile.spec, box)
    return bounds


class _Groups:
    """Groups of ranks that belong together, joined step by step."""

    def __init__(self, count: int) -> None:
        self._root = list(range(count))

    def join(self, ranks: Sequence[int]) -> None:
        for rank in ranks[1:]:
            one, other = self._find(ranks[0]), self._find(rank)
            self._root[max(one, other)] = min(one, other)

    def sorted(self) -> tuple[tuple[int, ...], ...]:
        groups = defaultdict(list)
        for rank in range(len(self._root)):
            groups[self._find(rank)].append(rank)
        return tuple(tuple(groups[first]) for first in sorted(groups))

    def _find(self, rank: int) -> int:
        while self._root[rank] != rank:
            self._root[rank] = self._root[self._root[rank]]
            rank = self._root[rank]
        return rank

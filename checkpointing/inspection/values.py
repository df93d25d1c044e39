"""The exact distance between the values of two checkpoints: only tiles that may differ are read."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from checkpointing.format.tiles import Box, TensorSpec
from checkpointing.inspection.arrays import array
from checkpointing.inspection.difference import Change, Difference, by_key, regions
from checkpointing.inspection.documents import CheckpointDocuments
from checkpointing.reading.reader import Checkpoint
from checkpointing.reading.resolver import Offered, TileSource, resolve

_BATCH = 64 << 20  # bytes of one checkpoint that are in memory at once


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueDifference:
    """One tensor's values in two checkpoints.

    elements: the number that differ, NaNs being equal to each other. max_abs: the largest distance between two that
    differ, inf if one of them is not a number. rms: the root of the mean square distance over all elements, None in
    that case.
    """

    key: str
    elements: int
    total: int
    max_abs: float
    rms: float | None


def doubtful(difference: Difference) -> list[str]:
    """Return the keys of tensors that both checkpoints have and that may differ."""
    return [one.key for one in difference.tensors if one.change in (Change.CHANGED, Change.RECUT)]


def to_read(before: CheckpointDocuments, after: CheckpointDocuments, keys: Sequence[str]) -> int:
    """Return how many bytes `value_differences` compares."""
    doubted = _doubted(before, after, keys)
    return sum(box.numel * after.specs[key].itemsize for key, boxes in doubted.items() for box in boxes)


def value_differences(
    before: tuple[CheckpointDocuments, Checkpoint],
    after: tuple[CheckpointDocuments, Checkpoint],
    keys: Sequence[str],
    progress: Callable[[int], None],
) -> Iterator[ValueDifference]:
    """Yield each tensor's difference in turn. progress: called with the number of bytes compared since its last call.

    MissingTile if a tile that is needed is damaged.
    """
    sides = [_Side(checkpoint) for _, checkpoint in (before, after)]
    for key, boxes in _doubted(before[0], after[0], keys).items():
        spec = after[0].specs[key]
        elements, largest, total = 0, 0.0, 0.0
        for batch in _batches(spec, boxes):
            old, new = (side.read(spec, batch) for side in sides)
            for box in batch:
                count, distance, square = _compare(spec.dtype, old[box], new[box])
                elements, largest, total = elements + count, max(largest, distance), total + square
                progress(box.numel * spec.itemsize)
        numel = spec.box.numel
        rms = math.sqrt(total / numel) if math.isfinite(total) and numel else None
        yield ValueDifference(key=key, elements=elements, total=numel, max_abs=largest, rms=rms)


def _doubted(before: CheckpointDocuments, after: CheckpointDocuments, keys: Sequence[str]) -> dict[str, list[Box]]:
    old, new = by_key(before.tiles), by_key(after.tiles)
    return {key: regions(old.get(key, []), new.get(key, [])) for key in keys}


def merged(several: Sequence[ValueDifference]) -> ValueDifference:
    """Return the difference of several tensors' values as if they were one tensor; the key is that of the first."""
    total = sum(one.total for one in several)
    squares = [one.rms**2 * one.total for one in several if one.rms is not None]
    return ValueDifference(
        key=several[0].key,
        elements=sum(one.elements for one in several),
        total=total,
        max_abs=max(one.max_abs for one in several),
        rms=math.sqrt(sum(squares) / total) if total and len(squares) == len(several) else None,
    )


class _Side:
    """One of the two checkpoints, with its offers by tensor."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._offers: dict[str, list[Offered]] = {}
        for offer in checkpoint.offers("store"):
            self._offers.setdefault(offer.spec.key, []).append(offer)
        self._source: TileSource = checkpoint.source("store")

    def read(self, spec: TensorSpec, boxes: Sequence[Box]) -> dict[Box, bytearray]:
        buffers = {box: bytearray(box.numel * spec.itemsize) for box in boxes}
        wanted = [(spec, box) for box in boxes]
        resolve(wanted, self._offers[spec.key], {"store": self._source}, lambda _, box: memoryview(buffers[box]))
        return buffers


def _batches(spec: TensorSpec, boxes: Sequence[Box]) -> Iterator[list[Box]]:
    batch: list[Box] = []
    size = 0
    for box in boxes:
        if batch and size + box.numel * spec.itemsize > _BATCH:
            yield batch
            batch, size = [], 0
        batch.append(box)
        size += box.numel * spec.itemsize
    if batch:
        yield batch


def _compare(dtype: str, before: bytearray, after: bytearray) -> tuple[int, float, float]:
    """Return how many elements differ, the largest distance, and the sum of squared distances."""
    old, new = array(dtype, before), array(dtype, after)
    differing = old != new
    if old.dtype.kind in "fc":
        differing &= ~(np.isnan(old) & np.isnan(new))
    count = int(differing.sum())
    if not count:
        return 0, 0.0, 0.0
    wide = np.complex128 if old.dtype.kind == "c" else np.float64
    with np.errstate(all="ignore"):
        distance = np.abs(new[differing].astype(wide) - old[differing].astype(wide))
        if not np.isfinite(distance).all():
            return count, math.inf, math.inf
        return count, float(distance.max()), float((distance * distance).sum())

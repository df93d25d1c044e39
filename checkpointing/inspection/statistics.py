"""A tensor's statistics, combined from those of its tiles.

They were rounded to six digits when the tiles were written, and leave NaNs out (format.md, section 2).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from checkpointing.format.manifest import StoredTile
from checkpointing.format.tiles import TensorSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorStatistics:
    """min, max and root of the mean square over all elements that are numbers; None if there are none.

    known: whether the tensor's dtype has statistics at all. infinite: whether some element is +inf or -inf.
    """

    spec: TensorSpec
    known: bool
    min: float | None = None
    max: float | None = None
    rms: float | None = None
    nans: int = 0

    @property
    def infinite(self) -> bool:
        """Whether an element is infinite."""
        return any(value is not None and math.isinf(value) for value in (self.min, self.max))

    @property
    def sound(self) -> bool:
        """Whether every element is a finite number, as far as statistics show."""
        return not self.nans and not self.infinite


def summarise(spec: TensorSpec, tiles: Iterable[StoredTile]) -> TensorStatistics:
    """Return the statistics of one tensor from its tiles, which together hold every element once."""
    known, nans, numbers = False, 0, 0
    low, high, total = math.inf, -math.inf, 0.0
    for tile in tiles:
        if tile.stats is None:
            continue
        known = True
        smallest, largest, square, missing = tile.stats
        nans += missing
        if smallest is None or largest is None or square is None:
            continue
        count = tile.box.numel - missing
        numbers += count
        low, high = min(low, float(smallest)), max(high, float(largest))
        total += float(square) * count
    if not numbers:
        return TensorStatistics(spec=spec, known=known, nans=nans)
    return TensorStatistics(spec=spec, known=known, min=low, max=high, rms=math.sqrt(total / numbers), nans=nans)


def together(several: Iterable[TensorStatistics]) -> TensorStatistics:
    """Return the statistics of several tensors as if they were one; the spec is that of the first."""
    rows = list(several)
    numbers = [row for row in rows if row.min is not None and row.max is not None and row.rms is not None]
    counts = [row.spec.box.numel - row.nans for row in numbers]
    nans = sum(row.nans for row in rows)
    if not sum(counts):
        return TensorStatistics(spec=rows[0].spec, known=any(row.known for row in rows), nans=nans)
    squares = sum((row.rms or 0.0) ** 2 * count for row, count in zip(numbers, counts, strict=True))
    return TensorStatistics(
        spec=rows[0].spec,
        known=True,
        min=min(row.min for row in numbers if row.min is not None),
        max=max(row.max for row in numbers if row.max is not None),
        rms=math.sqrt(squares / sum(counts)),
        nans=nans,
    )

"""Which samples a step consumes: pure functions of (data set length, global batch, seed, step).

Position k of the run is sample pi(k mod n) of the epoch k // n. Step s consumes positions [s*B, (s+1)*B), and its
micro-batch j the positions [s*B + j*b, s*B + (j+1)*b). Nothing here knows of ranks, so no change of layout can lose or
repeat a sample.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from elastic3d.data.permutation import Indices, KeyedPermutation, key, mix
from elastic3d.errors import ConfigurationError, UsageError

SUM_BITS = 40
STRIDE = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """The order in which a run of one seed consumes a data set of `length` samples."""

    length: int
    global_batch: int
    micro_batch: int
    seed: int

    def __post_init__(self) -> None:
        if self.length < 1:
            raise UsageError("the data set is empty; it must hold one sample at least")
        if self.micro_batch < 1 or self.global_batch < 1:
            raise UsageError(
                f"global_batch and micro_batch must be 1 or more; they are {self.global_batch} and {self.micro_batch}"
            )
        if self.global_batch % self.micro_batch:
            fits = [b for b in range(1, self.global_batch + 1) if self.global_batch % b == 0]
            below = max(b for b in fits if b <= self.micro_batch)
            above = self.micro_batch * -(-self.global_batch // self.micro_batch)
            raise ConfigurationError(
                f"micro_batch={self.micro_batch} does not divide global_batch={self.global_batch}; "
                f"micro_batch={below} or global_batch={above} would"
            )

    @property
    def micro_batches(self) -> int:
        """Number M of micro-batches in a step."""
        return self.global_batch // self.micro_batch

    def samples(self, first: int, stop: int) -> Indices:
        """Return the sample ids at positions [first, stop) of the run."""
        parts = []
        for epoch in range(first // self.length, -(-stop // self.length)):
            start = max(first, epoch * self.length) - epoch * self.length
            end = min(stop, (epoch + 1) * self.length) - epoch * self.length
            permutation = KeyedPermutation(self.length, self.seed, epoch)
            parts.append(permutation.of(np.arange(start, end, dtype=np.uint64)))
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.uint64)

    def micro_batch_samples(self, step: int, index: int) -> list[int]:
        """Return the sample ids of micro-batch `index` of a step."""
        first = step * self.global_batch + index * self.micro_batch
        return [int(i) for i in self.samples(first, first + self.micro_batch)]

    def keyed_sum(self, samples: Indices) -> int:
        """Return a sum over sample ids below 2**40 that does not depend on their order.

        Each id counts with a keyed hash of it, so that swapped ids do not cancel out. Sums of up to 8,192 ranks stay
        exact in float64 before they are reduced again by `fold_sums`.
        """
        hashed = mix(samples ^ key("samples", self.seed)) & np.uint64((1 << SUM_BITS) - 1)
        parts = np.array_split(hashed, 1 + hashed.size // (1 << 22))  # a part's sum stays below 2**64
        return fold_sums(int(part.sum(dtype=np.uint64)) for part in parts)

    def sum_of_positions(self, first: int, stop: int) -> int:
        """Return the keyed sum of the samples at positions [first, stop), in bounded memory."""
        bounds = range(first, stop, STRIDE)
        return fold_sums(self.keyed_sum(self.samples(start, min(stop, start + STRIDE))) for start in bounds)


def fold_sums(sums: Iterable[int]) -> int:
    """Return the keyed sum of a union from the keyed sums of its disjoint parts."""
    return sum(sums) % (1 << SUM_BITS)

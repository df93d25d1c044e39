"""A keyed permutation: the sample at each place of an epoch, without a table and without state.

A balanced Feistel network of four rounds permutes the smallest power of four that holds the data set; results that fall
outside are permuted again until they fall inside (cycle walking; Black and Rogaway, "Ciphers with arbitrary finite
domains", 2002). A domain at most four times too large takes fewer than four walks on average. The round function is the
finaliser of splitmix64 under a key derived by BLAKE3 from (seed, epoch, round): good mixing, not secrecy, is wanted.
"""

from __future__ import annotations

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from elastic3d.errors import UsageError

Indices = NDArray[np.uint64]

ROUNDS = 4
LONGEST = 1 << 62


def mix(values: Indices) -> Indices:
    """Return the splitmix64 finaliser of each value, a bijection on 64 bits (Steele, Lea and Flood, 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Indices = values ^ (values >> np.uint64(31))
    return mixed


def key(*parts: object) -> np.uint64:
    """Return a 64-bit key for `parts`, the same in every process and on every machine."""
    return np.uint64(int.from_bytes(blake3(repr(parts).encode()).digest(8), "little"))


class KeyedPermutation:
    """A bijection on 0..length-1, chosen by (seed, epoch)."""

    def __init__(self, length: int, seed: int, epoch: int) -> None:
        if not 0 < length <= LONGEST:
            raise UsageError(f"a data set has a length from 1 to 2**62; this one has {length}: give another")
        self.length = length
        bits = max(1, (length - 1).bit_length())
        self._half = np.uint64((bits + 1) // 2)
        self._mask = np.uint64((1 << int(self._half)) - 1)
        self._keys = [key("permutation", seed, epoch, round_) for round_ in range(ROUNDS)]

    def __call__(self, place: int) -> int:
        """Return the sample at one place of the epoch."""
        return int(self.of(np.array([place], dtype=np.uint64))[0])

    def of(self, places: Indices) -> Indices:
        """Return the samples at the given places, each in 0..length-1."""
        if places.size and int(places.max()) >= self.length:
            raise ValueError(f"place {int(places.max())} is outside an epoch of {self.length} samples")
        samples = self._network(places.astype(np.uint64))
        while (outside := samples >= np.uint64(self.length)).any():
            samples[outside] = self._network(samples[outside])
        return samples

    def _network(self, values: Indices) -> Indices:
        left, right = values >> self._half, values & self._mask
        for round_key in self._keys:
            left, right = right, left ^ (mix(right ^ round_key) & self._mask)
        whole: Indices = (left << self._half) | right
        return whole

"""The order of a data set whose samples are numbered stratum by stratum, so that each batch has all strata's shares.

Think of an epoch's N samples in a row, stratum by stratum, each stratum in a keyed permutation of its own. The row is
dealt out like cards: with S batches of B in an epoch, a batch takes every S-th sample. Of a stratum of n samples it so
gets floor(n / S) or ceil(n / S), its share B * n / N rounded down or up, and all batches together get each sample once.

Where B does not divide N, an epoch begins with the rest of the batch in which the one before has ended, and ends with
the beginning of another. The samples of these two parts are taken out first, evenly over the whole row, and dealt to
the two likewise; S then counts the whole batches. Those still have floor or ceil of B * n / N, exactly: n less its
floor or ceil of the parts' share is a floor or a ceil of S * B * n / N, and rounding twice is rounding once. Each part
has its share to less than two samples, and so the one batch that two epochs have in common, to less than four.

B is the global batch of the run's first steps. Where it changes (`elastic3d.Growing`), the stretches of B positions
stay as they are, since what was consumed must not depend on what comes later. Every function takes O(log strata) for
each position, and builds nothing.
"""

from __future__ import annotations

from itertools import accumulate

import numpy as np

from elastic3d.data.apportionment import golden_step
from elastic3d.data.permutation import Indices, KeyedPermutation, key
from elastic3d.errors import UsageError

LONGEST = 1 << 31
"""Most samples that can be stratified: products of two numbers of samples stay below 2**64."""

MOST = 4096
"""Most strata: their sizes go into every snapshot."""

Strata = tuple[int, ...]
"""Number of samples of each stratum."""


def check_strata(strata: Strata, length: int | None) -> None:
    """Refuse strata that are not those of a data set of `length` samples; UsageError."""
    if length is None or sum(strata) != length or min(strata) < 1:
        raise UsageError(f"strata of {strata[:10]} samples are not those of a data set of {length}")
    if length > LONGEST:
        raise UsageError(f"a data set of {length:,} samples cannot be stratified; at most {LONGEST:,} can")
    if len(strata) > MOST:
        raise UsageError(
            f"{len(strata):,} strata are more than the {MOST:,} that a run can keep in its state: merge labels, or "
            "leave out those that are rare"
        )


def samples(strata: Strata, *, batch: int, seed: int, first: int, stop: int) -> Indices:
    """Return the sample numbers at positions [first, stop) of the run, which are those of the strata's row."""
    length = sum(strata)
    starts = np.array([0, *accumulate(strata)], dtype=np.uint64)
    parts = []
    for epoch in range(first // length, -(-stop // length)):
        begin, end = max(first, epoch * length) - epoch * length, min(stop, (epoch + 1) * length) - epoch * length
        rows = _rows(np.arange(begin, end, dtype=np.uint64), length, batch, seed, epoch)
        numbers = np.searchsorted(starts, rows, side="right") - 1
        chosen = np.empty_like(rows)
        for stratum in np.unique(numbers):
            inside, start = numbers == stratum, starts[stratum]
            permutation = KeyedPermutation(strata[stratum], int(key("stratum", seed, int(stratum))), epoch)
            chosen[inside] = start + permutation.of(rows[inside] - start)
        parts.append(chosen)
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.uint64)


def _rows(places: Indices, length: int, batch: int, seed: int, epoch: int) -> Indices:
    """Return the index in the row of each place of an epoch: a bijection of 0..length-1."""
    head = min(length, -epoch * length % batch)
    whole = (length - head) // batch
    dealt = whole * batch
    aside = length - dealt
    turn = int(key("strata", seed, epoch))
    rows = np.empty_like(places)
    for begin, end in ((0, head), (head + dealt, length)):
        inside = (begin <= places) & (places < end)
        if inside.any():
            taken = _spread(places[inside] - np.uint64(begin), end - begin, turn)
            among = _evenly(taken, head, aside) if begin < head else _between(taken, head, aside)
            rows[inside] = _evenly(among, aside, length)
    inside = (head <= places) & (places < head + dealt)
    if inside.any():
        number, slot = np.divmod(places[inside] - np.uint64(head), np.uint64(batch))
        item = _spread(slot, batch, turn) * np.uint64(whole) + _spread(number, whole, turn)
        rows[inside] = _between(item, aside, length)
    return rows


def _spread(places: Indices, count: int, turn: int) -> Indices:
    """Return a permutation of 0..count-1 in which neighbours are far apart."""
    return (places * np.uint64(golden_step(count)) + np.uint64(turn % count)) % np.uint64(count)


def _evenly(numbers: Indices, chosen: int, length: int) -> Indices:
    """Return where each of `chosen` places lies that are chosen evenly among `length`."""
    reached = (numbers + np.uint64(1)) * np.uint64(length)
    return (reached + np.uint64(chosen - 1)) // np.uint64(chosen) - np.uint64(1)


def _between(numbers: Indices, chosen: int, length: int) -> Indices:
    """Return where each of the places lies that `_evenly` leaves."""
    return numbers + numbers * np.uint64(chosen) // np.uint64(length - chosen)

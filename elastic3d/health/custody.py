"""State that nobody writes to stays what it is, and ranks leave a vote with one outcome: what is looked at, and judged.

Between two updates nobody writes to parameters and the optimizer's state. So where its passes begin a rank copies a
part of them beside, and compares before its update: what differs then was changed by nobody. The part rotates over
everything, as large as its share of the time allows, so that memory that loses bits again and again is found within one
rotation; a bit that is lost once is found only where that was looked at.

The copy is a second one of this node's own, rather than the snapshot: a script may write to its parameters between two
steps, in ways that leave no trace in torch (`p.data`), and snapshots are not taken at every step. What changed within
the passes, without any operation of torch's, in few words, nobody's code has written. The snapshot is the third copy:
where it agrees with the one taken beside, it is the live state that changed.

The buddy's copy of that snapshot is not asked. It could only tell which of two memories of this same node lost a bit,
and nothing depends on that: the node is named in either case, and the step is not made. Whoever restores compares each
tile with the digest that it had when it was taken, and takes the buddy's where this node's own is another one.

All of it is pure: no clock, no tensor.
"""

from __future__ import annotations

import math
import struct
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from blake3 import blake3

from elastic3d.parallel.numerics.update import Update
from elastic3d.parallel.vote import Outcome

GRAIN = 64
"""Bytes that are never cut: a number of any dtype, and a line of the cache."""

LEAST = 64 << 10
"""Bytes below which a look costs more by itself than by what it looks at."""

MOST = 64 << 20
"""Bytes of the largest part: those of the memory that its copy takes."""

FEW = 64
"""Words of 8 bytes that memory may change at once. Where more differ, code has written to them."""

BITS = 2
"""Bits of one word that memory may change at once, likewise: code writes numbers, which differ in many."""

RATE = 1e9
"""Bytes a second that are copied and compared, before it is measured."""

LONGEST = 10.0
"""Seconds of one step that count: a pause of the script's earns nothing more."""

SUSPENDED = 16.0
"""How many times as long as it ought to a look takes at most; what it took beyond that, this process did not run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """The bytes [start, stop) of tensor number `index`."""

    index: int
    start: int
    stop: int


class Rotation:
    """Goes round over the bytes of tensors, each of `sizes` bytes, from the `at`-th byte of all."""

    def __init__(self, sizes: Sequence[int], at: int = 0) -> None:
        self._sizes = list(sizes)
        self.total = sum(self._sizes)
        self._index = self._start = 0
        rest = at % self.total if self.total else 0
        while rest >= self._sizes[self._index] if self.total else False:
            rest -= self._sizes[self._index]
            self._index += 1
        self._start = rest // GRAIN * GRAIN

    def take(self, nbytes: int) -> list[Stretch]:
        """Return the next `nbytes`, whole grains but at a tensor's end, nothing twice; they follow on those before."""
        taken: list[Stretch] = []
        left = min(nbytes, self.total)
        while (stretch := self.next(left)) is not None:
            taken.append(stretch)
            left -= stretch.stop - stretch.start
        return taken

    def next(self, nbytes: int) -> Stretch | None:
        """Return what follows of one tensor, at most `nbytes`; None if these are too few for a grain."""
        while self.total and nbytes > 0:
            size = self._sizes[self._index]
            stop = min(size, self._start + nbytes)
            if stop < size:
                stop = stop // GRAIN * GRAIN
                if stop <= self._start:
                    return None
            stretch = Stretch(index=self._index, start=self._start, stop=stop)
            self._start = stop
            if stop >= size:
                self._index, self._start = (self._index + 1) % len(self._sizes), 0
            if stretch.stop > stretch.start:
                return stretch
        return None


class LookBudget:
    """How many bytes may be looked at in a step, so that looking takes at most `share` of the time, over all steps."""

    def __init__(self, share: float) -> None:
        self._share, self._rate = share, RATE
        self._room = 0.0

    def stepped(self, seconds: float) -> None:
        """Earn what a step of so many seconds allows; at most two steps' worth is kept."""
        earned = self._share * min(seconds, LONGEST)
        self._room = min(self._room, max(earned, LEAST / self._rate)) + earned

    def nbytes(self) -> int:
        """Return how many bytes may be looked at now, 0 for none."""
        nbytes = int(self._room * self._rate)
        return min(nbytes, MOST) if nbytes >= LEAST else 0

    def spent(self, seconds: float, nbytes: int) -> None:
        """Pay for a look, and learn from it what the next one will cost.

        A machine that was suspended meanwhile is not paid for: it would take hours until the next look.
        """
        self._room -= min(seconds, SUSPENDED * (nbytes + LEAST) / self._rate)
        if seconds > 0 and nbytes >= LEAST:
            self._rate += (nbytes / seconds - self._rate) / 4


def written(changed: Sequence[Mapping[int, int]]) -> bool:
    """Return whether code has written what changed, rather than memory lost it.

    changed: for each tensor that differs, how many bits of each word do. Memory changes few bits of few words in one
    place. What code does may look like that, but what does not is none of memory's, and nobody is to be blamed for it.
    """
    words = [bits for tensor in changed for bits in tensor.values()]
    return len(changed) > 1 or len(words) > FEW or any(bits > BITS for bits in words)


def outcome_digest(outcome: Outcome, change: Update) -> float:
    """Return a number that is the same for two ranks only if they left a vote with the same outcome.

    Of what the outcome decides and what follows from it, by its bits: below 2^53, so that a vote carries it exactly.
    """
    numbers = (
        outcome.loss,
        outcome.tokens,
        outcome.norm,
        change.factor,
        change.norm,
        outcome.snapshot_needs,
        outcome.unsaved,
    )
    asked = (outcome.leave, outcome.etcd_away, outcome.checkpoint, outcome.due)
    flags = (*asked, outcome.gradients_finite, change.skipped)
    counts = (outcome.safe_step, outcome.snapshot_rank, outcome.samples, outcome.sample_sum)
    text = "\0".join((*map(_exact, numbers), *map(str, flags), *map(str, counts), *sorted(outcome.absent)))
    return float(1 + int.from_bytes(blake3(text.encode()).digest(length=8), "little") % ((1 << 53) - 1))


def _exact(number: float | None) -> str:
    if number is None or math.isnan(number):
        return str(number)
    return struct.pack("<d", number).hex()


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Ranks left a vote with different outcomes. odd: those that differ from the others, none if that is not sure.

    detail: for people.
    """

    odd: tuple[int, ...]
    detail: str


def split(digests: Sequence[float], nodes: Sequence[str], devices: Sequence[str]) -> Split | None:
    """Return what follows from the digests of every rank's last outcome; None if all are the same.

    A rank is odd only if more than half of all ranks, on two nodes at least, agree with each other and differ from it,
    and one of them computes on a device of its kind: unlike processors may add up in another way. nodes, devices: of
    each rank.
    """
    ranks: dict[float, list[int]] = defaultdict(list)
    for rank, digest in enumerate(digests):
        ranks[digest].append(rank)
    if len(ranks) <= 1:
        return None
    most = max(ranks.values(), key=len)
    odd = [rank for rank in range(len(digests)) if digests[rank] != digests[most[0]]]
    if 2 * len(most) <= len(digests) or len({nodes[rank] for rank in most}) < 2:
        parts = "; ".join(_ranks(one) for one in list(ranks.values())[:4])
        return Split(odd=(), detail=f"{parts} left the last vote with different outcomes: no majority of two nodes")
    kinds = {devices[rank] for rank in most}
    strange = [rank for rank in odd if devices[rank] not in kinds]
    if strange:
        return Split(
            odd=(),
            detail=f"{_ranks(strange)} left the last vote with another outcome than the others, and computes on a "
            f"{devices[strange[0]]}, which none of them does: unlike devices need not come to equal bits",
        )
    return Split(odd=tuple(odd), detail=f"{_ranks(odd)} left the last vote with another outcome than all others")


def _ranks(ranks: Sequence[int]) -> str:
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:8]))}{more}"

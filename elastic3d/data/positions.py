"""The samples that a step consumes: pure functions of (data set length, global batches, seed, step).

Position k of the run is sample pi(k mod n) of the epoch k // n; for a stream, whose length nobody knows, it is the k-th
sample that comes; `strata` and `mixing` have the orders of stratified data sets and of mixtures. Where the data set of
a run has changed its length, positions from there on count from 0 in it, in epochs of new numbers. Step s consumes the
B(s) positions after those of all steps before it, and its micro-batch j the positions [j*b, (j+1)*b) among them, or
those that a budget of tokens groups (`budget`). Nothing here depends on ranks, so no change of layout can lose or
repeat a sample.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from elastic3d.data import holes as ranges
from elastic3d.data import mixing, sizes, strata
from elastic3d.data.adaptive import Adaptive
from elastic3d.data.budget import Budget
from elastic3d.data.holes import Holes
from elastic3d.data.permutation import Indices, KeyedPermutation, key, mix
from elastic3d.data.proportions import MixedSource, Proportions
from elastic3d.data.strata import Strata, check_strata
from elastic3d.errors import ConfigurationError, UsageError
from elastic3d.values import HERE

SUM_BITS = 40
STRIDE = 1 << 20

KEPT = 64
"""Steps whose micro-batches an order remembers, where a budget makes them: more than are looked at ahead."""

Group = tuple[Indices, Indices, int]
"""The positions of the samples of a micro-batch, their ids, and their tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """The order in which a run of one seed consumes a data set of `length` samples; None for a stream.

    global_batch: samples of step 0. changes: (from step, global batch) of every later size, in order of steps.
    holes: positions that are excluded, and never consumed. earlier: (position behind its last, length) of every data
    set that the run consumed before this one, in order; of a plain data set only. strata: of a stratified data set, the
    number of samples of each stratum, in whose order they are numbered. proportions: of a mixture, its sources and
    their weights. adaptive: how later sizes are chosen as the run goes, which become `changes`; None if they are not.
    slices: of an island, from which position on it takes which of the positions that all islands share: (position of
    its own, position that it takes), in order; () for a run that has all of them. budget: of tokens, by which
    micro-batches are cut; micro_batch is 1 then, and their number another one in each step. None where all have as many
    samples.
    """

    length: int | None
    global_batch: int
    micro_batch: int
    seed: int
    changes: sizes.Parts = ()
    holes: Holes = ()
    earlier: tuple[tuple[int, int], ...] = ()
    strata: Strata = ()
    proportions: Proportions | None = None
    adaptive: Adaptive | None = None
    slices: tuple[tuple[int, int], ...] = ()
    budget: Budget | None = None
    _grouped: dict[int, list[Group]] = field(default_factory=dict, init=False, compare=False, repr=False, metadata=HERE)

    def __post_init__(self) -> None:
        if self.length is not None and self.length < 1:
            raise UsageError("the data set is empty; it must hold one sample at least")
        if self.micro_batch < 1 or self.global_batch < 1:
            raise UsageError(
                f"global_batch and micro_batch must be 1 or more; they are {self.global_batch} and {self.micro_batch}"
            )
        ends = [0, *(end for end, _ in self.earlier)]
        if any(here >= there for here, there in pairwise(ends)) or any(length < 1 for _, length in self.earlier):
            raise UsageError(f"earlier data sets are (position, length), in order; they are {self.earlier}")
        if self.earlier and (self.strata or self.proportions is not None):
            raise UsageError("no data sets come before a stratified one or a mixture in one run")
        if self.strata:
            check_strata(self.strata, self.length)
        sizes.check_parts(self.parts)
        for step, batch in self.parts:
            if batch % self.micro_batch:
                since = f" (from step {step} on)" if self.changes else ""
                every = [size for _, size in self.parts]
                below = max(b for b in range(1, self.micro_batch + 1) if not any(size % b for size in every))
                above = self.micro_batch * -(-batch // self.micro_batch)
                raise ConfigurationError(
                    f"micro_batch={self.micro_batch} does not divide global_batch={batch}{since}; "
                    f"micro_batch={below} or global_batch={above} would"
                )
        if self.adaptive is not None:
            self.adaptive.check_leaf(self.micro_batch, 1)
        if self.budget is not None:
            self._check_budget(self.budget)

    def _check_budget(self, budget: Budget) -> None:
        assert self.micro_batch == 1
        assert self.length is not None
        if self.adaptive is not None:
            raise UsageError(
                "micro_batch=TokenBudget(...) does not go with global_batch=Adaptive(...), which compares "
                "micro-batches of one number of samples; give one of the two as a number"
            )
        for _, batch in self.parts:
            budget.check(batch)

    @property
    def parts(self) -> sizes.Parts:
        """Every (from step, global batch), the first from step 0."""
        return ((0, self.global_batch), *self.changes)

    @property
    def micro_batches(self) -> int:
        """Smallest number M of micro-batches of any step, which every layout must be able to run.

        With a budget that of the run's first step: the smallest that there may be is met by hardly any.
        """
        return self.counts[0] if self.budget is None else self.micro_batches_at(0)

    @property
    def counts(self) -> tuple[int, ...]:
        """Every number M of micro-batches that some step has, or may have, smallest first.

        With a budget the smallest, the next and the largest that there may be, which stand for all between.
        """
        if self.budget is not None:
            bounds = [self.budget.bounds(size) for _, size in self.parts]
            fewest, most = min(few for few, _ in bounds), max(many for _, many in bounds)
            return tuple(sorted({fewest, min(most, fewest + self.budget.multiple), most}))
        chosen = () if self.adaptive is None else self.adaptive.sizes
        return tuple(sorted({batch // self.micro_batch for batch in (*chosen, *(size for _, size in self.parts))}))

    @property
    def multiple(self) -> int:
        """Of which any multiple between the smallest and the largest of `counts` may occur; 0 where those are all."""
        return 0 if self.budget is None else self.budget.multiple

    def check_leaf(self, leaf: int) -> None:
        """Raise ConfigurationError unless every step has a whole number of leaves of this many micro-batches."""
        if self.adaptive is not None:
            self.adaptive.check_leaf(self.micro_batch, leaf)
        for step, batch in self.parts:
            if self.budget is not None:
                self.budget.check(batch, leaf)
                continue
            count = batch // self.micro_batch
            if count % leaf:
                since = f" (from step {step} on)" if self.changes else ""
                below = max(b for b in range(1, leaf + 1) if not any(one % b for one in self.counts))
                above = self.micro_batch * leaf * -(-count // leaf)
                raise ConfigurationError(
                    f"leaf={leaf} does not divide the {count} micro-batches of a step{since}; leaf={below} or "
                    f"global_batch={above} would"
                )

    def taken(self, step: int) -> int | sizes.Growing:
        """Return the global batch of the steps before `step`; that of later ones may still be changed."""
        parts = [part for part in self.parts if part[0] < max(step, 1)]
        return sizes.Growing(*parts) if len(parts) > 1 else parts[0][1]

    def batch_at(self, step: int) -> int:
        """Return the number of samples of a step."""
        return sizes.part_at(self.parts, step)[1]

    def micro_batches_at(self, step: int) -> int:
        """Return the number of micro-batches of a step."""
        return self.batch_at(step) // self.micro_batch if self.budget is None else len(self._groups(step, self.budget))

    def micro_batches_of(self, step: int, samples: int) -> int:
        """Return how many micro-batches of a step have so many samples together; about so many where a budget cuts."""
        return samples * self.micro_batches_at(step) // self.batch_at(step) if samples else 0

    def sizes_at(self, step: int) -> tuple[int, ...]:
        """Return the number of samples of each micro-batch of a step; () where all have as many."""
        return () if self.budget is None else tuple(len(places) for places, *_ in self._groups(step, self.budget))

    def tokens_at(self, step: int) -> tuple[int, ...]:
        """Return the tokens of each micro-batch of a step; () where no budget cuts them."""
        return () if self.budget is None else tuple(tokens for *_, tokens in self._groups(step, self.budget))

    def _groups(self, step: int, budget: Budget) -> list[Group]:
        """Return the micro-batches that a budget makes of a step."""
        made = self._grouped.get(step)
        if made is None:
            first, stop = self.positions(step)
            samples = self.samples(first, stop)
            made = [
                (group.astype(np.uint64) + np.uint64(first), samples[group], tokens)
                for group, tokens in budget.groups(samples)
            ]
            self._grouped[step] = made
            # The thread that loads ahead asks, too: what it has forgotten meanwhile may be forgotten.
            for old in [*self._grouped][:-KEPT]:
                self._grouped.pop(old, None)
        return made

    def positions(self, first_step: int, stop_step: int | None = None) -> tuple[int, int]:
        """Return the half-open positions of a step, or of steps [first_step, stop_step)."""
        stop_step = first_step + 1 if stop_step is None else stop_step
        return sizes.position_at(self.parts, first_step), sizes.position_at(self.parts, stop_step)

    def excluded(self, step: int) -> tuple[int, ...]:
        """Return the numbers of the micro-batches of a step that are holes, or have one among their samples."""
        first, stop = self.positions(step)
        size = self.micro_batch
        parts = ranges.inside(self.holes, first, stop)
        if self.budget is not None:
            out = {position for begin, end in parts for position in range(begin, end)}
            groups = self._groups(step, self.budget) if out else []
            return tuple(j for j, (places, *_) in enumerate(groups) if not out.isdisjoint(places.tolist()))
        numbers = {one for begin, end in parts for one in range((begin - first) // size, -(-(end - first) // size))}
        return tuple(sorted(numbers))

    def empty(self, step: int) -> bool:
        """Return whether nothing is left of a step: all its positions are holes."""
        first, stop = self.positions(step)
        return ranges.length(ranges.inside(self.holes, first, stop)) == stop - first

    def positions_of(self, step: int, micro_batches: Iterable[int]) -> Holes:
        """Return the positions of some micro-batches of a step."""
        if self.budget is not None:
            every = self._groups(step, self.budget)
            places = [place for number in micro_batches for place in every[number][0].tolist()]
            return ranges.joined((place, place + 1) for place in places)
        first, size = self.positions(step)[0], self.micro_batch
        return ranges.joined((first + number * size, first + (number + 1) * size) for number in micro_batches)

    def excluding(self, holes: Holes) -> Order:
        """Return the same order with more holes. Nothing shifts."""
        return replace(self, holes=ranges.joined((*self.holes, *holes)))

    def whole_holes(self, leaf: int, *, since: int = 0) -> Order:
        """Return the same order, the holes of steps from `since` on being of whole leaves of micro-batches.

        A leaf is added up before anybody could leave out a part of it.
        """
        widened: list[tuple[int, int]] = []
        start, last = self.positions(since)[0], max((0, *(end for _, end in self.holes)))
        for begin, end in ranges.inside(self.holes, start, last):
            at = begin
            while at < end:
                step = self.step_at(at)
                first, stop = self.positions(step)
                if self.budget is not None:
                    leaves = {number // leaf for number in self.excluded(step)}
                    widened += self.positions_of(step, [one * leaf + inner for one in leaves for inner in range(leaf)])
                    at = stop
                    continue
                size = self.micro_batch * leaf
                at = min(stop, first + ((at - first) // size + 1) * size)
                widened.append((at - size, at))
        return self.excluding(ranges.joined(widened)) if widened else self

    def step_at(self, position: int) -> int:
        """Return the step that consumes a position."""
        return sizes.step_at(self.parts, position)

    def samples(self, first: int, stop: int) -> Indices:
        """Return the sample ids at positions [first, stop) of the run; a stream's are the positions themselves."""
        if self.length is None:
            return np.arange(first, stop, dtype=np.uint64)
        if self.slices:
            every = replace(self, slices=())
            shared = [every.samples(begin, end) for begin, end in self.shared(first, stop)]
            return np.concatenate(shared) if shared else np.empty(0, dtype=np.uint64)
        if self.proportions is not None:
            return mixing.samples(self.proportions, self.parts, self.seed, first, stop)
        if self.strata:
            return strata.samples(self.strata, batch=self.global_batch, seed=self.seed, first=first, stop=stop)
        parts: list[Indices] = []
        begin = epochs = 0
        last = max(stop, *(end for end, _ in self.earlier), 0)
        for end, length in (*self.earlier, (last, self.length)):
            if first < end and begin < stop:
                parts += self._permuted(length, epochs, max(first, begin) - begin, min(stop, end) - begin)
            epochs += -(-(end - begin) // length)
            begin = end
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.uint64)

    def shared(self, first: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yield the positions that all islands share which are at positions [first, stop) of this one, by slice."""
        at = bisect.bisect_right(self.slices, first, key=lambda one: one[0]) - 1
        while first < stop:
            start, taken = self.slices[at]
            end = min(stop, self.slices[at + 1][0]) if at + 1 < len(self.slices) else stop
            yield taken + first - start, taken + end - start
            first, at = end, at + 1

    def place_of(self, position: int) -> int:
        """Return the position that all islands share which is at a position of this one; the same where it has all."""
        return next(self.shared(position, position + 1))[0] if self.slices else position

    def slicing(self, position: int, taken: int) -> Order:
        """Return the same order, of an island that takes the shared positions from `taken` on at `position`."""
        kept = tuple(one for one in self.slices or ((0, 0),) if one[0] < position)
        return replace(self, slices=(*kept, (position, taken)))

    def _permuted(self, length: int, epochs: int, first: int, stop: int) -> Iterator[Indices]:
        """Yield the sample ids at positions [first, stop) of a data set, whose first epoch is number `epochs`."""
        for epoch in range(first // length, -(-stop // length)):
            start = max(first, epoch * length) - epoch * length
            end = min(stop, (epoch + 1) * length) - epoch * length
            permutation = KeyedPermutation(length, self.seed, epochs + epoch)
            yield permutation.of(np.arange(start, end, dtype=np.uint64))

    def following(self, saved: Order, step: int) -> Order:
        """Return this order as it goes on after the steps of another one: what those consumed stays as it was.

        saved: in which a state of `step` steps was made, of a data set of any length.
        """
        sized = self.sized_as(saved, step)
        earlier, here = saved.earlier, sized.positions(step)[0]
        reached = earlier[-1][0] if earlier else 0
        if saved.length is not None and saved.length != self.length and here > reached and self.proportions is None:
            earlier = (*earlier, (here, saved.length))
        return replace(sized, earlier=earlier, slices=saved.slices)

    def sized_as(self, saved: Order, step: int) -> Order:
        """Return this order with the sizes that a state of `step` steps says were chosen, if it has them chosen."""
        if self.adaptive is None:
            return self
        # The next step's size is the state's, too, if that was chosen.
        until = step if saved.adaptive is not None else step - 1
        order = replace(self, changes=tuple(part for part in saved.changes if part[0] <= until))
        size = self.adaptive.nearest(order.batch_at(step))
        if size == order.batch_at(step) or not step:
            return order
        return replace(order, changes=tuple(part for part in order.changes if part[0] < step)).resized(step, size)

    def resized(self, step: int, size: int) -> Order:
        """Return this order with another global batch from a step on that is later than all changes before."""
        return replace(self, changes=(*self.changes, (step, size)))

    def by_source(self, step: int) -> list[tuple[MixedSource, int]]:
        """Return how many positions each source of a mixture has before `step`; [] for another data set."""
        if self.proportions is None:
            return []
        counts = mixing.consumed(self.proportions, self.parts, self.seed, step)
        return list(zip(self.proportions.sources, counts, strict=True))

    def micro_batch_samples(self, step: int, index: int) -> list[int]:
        """Return the sample ids of micro-batch `index` of a step."""
        return [sample for _, sample in self.micro_batch_places(step, index)]

    def micro_batch_places(self, step: int, index: int) -> list[tuple[int, int]]:
        """Return (position, sample id) of all samples of micro-batch `index` of a step."""
        if self.budget is not None:
            places, numbers, _ = self._groups(step, self.budget)[index]
            return list(zip(places.tolist(), numbers.tolist(), strict=True))
        first = self.positions(step)[0] + index * self.micro_batch
        samples = self.samples(first, first + self.micro_batch)
        return [(position, int(sample)) for position, sample in enumerate(samples, start=first)]

    def keyed_sum(self, samples: Indices) -> int:
        """Return a sum over sample ids below 2**40 that does not depend on their order.

        Each id counts by its keyed hash, so that swapped ids do not cancel out. Sums of up to 8,192 ranks stay
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

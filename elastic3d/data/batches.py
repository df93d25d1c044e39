"""The batches of a run: every rank's micro-batches of each step, as tensors.

The state of the data is only the step and, for a stream, its cursor. Micro-batch j of a step belongs to dp rank j % dp,
in round j // dp; with leaves of g micro-batches it is leaf j // g whose rank and turn are found so. If dp does not
divide their number the last round has places without a micro-batch. Their ranks run some other micro-batch for the sake
of the collectives, marked `counts=False`, and the receiver drops its results. Where dp ranks have unequal shares
(`elastic3d.owners`), those without a micro-batch in a round run none.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch

from elastic3d.data.adaptive import Adaptive
from elastic3d.data.ahead import Ahead
from elastic3d.data.budget import TokenBudget
from elastic3d.data.collating import Collate, Collating, Pair, digest_of
from elastic3d.data.dataset_facts import fingerprint_of, is_numbered, name_of
from elastic3d.data.holes import Holes, between, given, inside, joined, length
from elastic3d.data.making import Drawn, Keyed, Undrawn, moved, pinned
from elastic3d.data.micro_batches import PASSED_OVER, Batch, MicroBatch
from elastic3d.data.mixture import Mixture
from elastic3d.data.positions import Order, fold_sums
from elastic3d.data.sizes import Growing, check_whole
from elastic3d.data.sources import Loaded, Numbered, SampleSource, Share, Streamed
from elastic3d.data.stratified import Stratified
from elastic3d.data.streams import Cursor, SampleStream, check_stream
from elastic3d.errors import UsageError
from elastic3d.port import UNRECORDED, Progress


class Dataset(Protocol):
    """A map-style data set of samples, numbered from 0: pairs (input, target), or dictionaries with `labels`."""

    def __len__(self) -> int:
        """Return the number of samples."""
        ...

    def __getitem__(self, index: int) -> Any:
        """Return sample `index`, always the same on every node."""
        ...


MADE_AGAIN = 3
"""How often a micro-batch is made again to see if it is the same each time: one of few samples, which are flipped at
random, is often equal twice."""

FURTHER = 8
"""Micro-batches by which ranks see if their data sets are others, and do not only draw now and then."""


class Batches:
    """Iterate the steps of a run over a data set, map-style or a stream. `step` is the number of steps made, `goal` the
    one up to which to iterate, 0 before that is known. `read` is how many bytes the present step's samples were
    made of, as far as their sources count them. `untried` are holes that were known before their steps. `varies`
    is whether micro-batches may be of several shapes, `sample_tokens` the number of tokens of each sample, 0 where the
    data set does not say. `stepped` is called when the script asks for the next batch, or that there is none. In an
    island, `reach` is the step up to which it is known which samples there are, which `stepped` moves on, and `rounds`
    the steps of a round.

    The next step is loaded while the present one trains: in a thread, or by `workers` DataLoader processes (one, for a
    stream). They are forked from the trainer when the iteration starts and belong to its process group, so whatever
    ends the trainer ends them.
    """

    def __init__(
        self,
        dataset: Dataset | Iterable[Any],
        *,
        global_batch: int | Growing | Adaptive,
        micro_batch: int | TokenBudget,
        seed: int,
        exclude: Iterable[tuple[int, int]] = (),
        share: Share | None = None,
        workers: int = 0,
        collate: Collate | None = None,
        one_shape: bool = False,
        device: torch.device | None = None,
        progress: Progress = UNRECORDED,
    ) -> None:
        if not isinstance(workers, int) or workers < 0:
            raise UsageError(f"workers must be a number of processes, 0 for a thread; it is {workers!r}")
        sizes: dict[str, Any] = {"global_batch": global_batch, "micro_batch": micro_batch}
        plain = {name: size for name, size in sizes.items() if not isinstance(size, Growing | Adaptive | TokenBudget)}
        check_whole("run.batches", **plain, seed=seed)
        numbered = is_numbered(dataset)
        if not numbered:
            check_stream(dataset)
        self._stream = SampleStream(dataset)
        budget = micro_batch.of(dataset) if isinstance(micro_batch, TokenBudget) else None
        adaptive = global_batch if isinstance(global_batch, Adaptive) else None
        given_size = global_batch.start if isinstance(global_batch, Adaptive) else global_batch
        (_, first), *changes = given_size.parts if isinstance(given_size, Growing) else ((0, given_size),)
        self.order = Order(
            length=len(dataset) if numbered else None,  # type: ignore[arg-type]
            global_batch=first,
            micro_batch=1 if isinstance(micro_batch, TokenBudget) else micro_batch,
            seed=seed,
            changes=tuple(changes),
            holes=given(exclude),
            strata=dataset.strata if isinstance(dataset, Stratified) else (),
            proportions=dataset.proportions if isinstance(dataset, Mixture) else None,
            adaptive=adaptive,
            budget=budget,
        )
        self.untried = self.order.holes
        self._numbered = numbered
        self._dataset = dataset
        self._collating = Collating(collate)
        if budget is not None and one_shape:
            raise UsageError(
                "run.batches: one_shape=True says that all micro-batches are of one shape, and those of a TokenBudget "
                "have as many samples as fit; leave it out, or give micro_batch= as a number of samples"
            )
        self.varies = budget is not None or (collate is not None and not one_shape)
        self.take(share or Share())
        self.order.check_leaf(self.share.leaf)
        self._check_holes()
        self.workers = workers
        self.device = device or torch.device("cpu")
        self.progress = progress
        self.step = 0
        self.goal = self.read = 0
        self._yielded = -1
        self._resized = False
        self._stopped: int | None = None
        self.stepped: Callable[[], None] = lambda: None
        self.reach: int | None = None
        self.rounds = 0
        # What nodes, and runs over one state, must have in common besides the length, if the data set has it.
        self.fingerprint = fingerprint_of(dataset)
        self.sample_tokens = _sample_tokens(dataset)
        self._keyed = Keyed(seed, lent=True)
        self._cursors: dict[int, Cursor] = {}
        self.model_draws: Callable[[], bool | None] = lambda: False
        """Returns whether the model's passes draw from the generators of Python and numpy; None if that is not known
        yet."""
        self._threaded = True
        self._closed: Ahead[Loaded] | None = None
        self._kept: dict[int, Pair] = {}

    def take(self, share: Share) -> None:
        """Load this part of each step from now on; not while steps are iterated."""
        self.share = share
        self._source: SampleSource = (
            Numbered(self._dataset, self.order, share, self._collating)
            if self._numbered
            else Streamed(self._stream, self.order, share, self._collating)
        )

    @property
    def rereads(self) -> bool:
        """Whether `again` can load any micro-batch of any step: not from a stream."""
        return self._numbered

    @property
    def under_way(self) -> bool:
        """Whether the batch of a step has been yielded, and the step is not made yet."""
        return self._yielded == self.step

    def stop(self, step: int) -> None:
        """Yield no step from `step` on, whatever `until` says: the run is over then. Alike on every rank."""
        self._stopped = self.goal = step

    @property
    def global_batch(self) -> int:
        """The number of samples of the present step."""
        return self.order.batch_at(self.step)

    def resize(self, step: int, size: int) -> None:
        """Have `size` samples in each step from `step` on, the next one. Alike on every rank.

        What is loaded of it already is loaded anew; a stream is read again up to there where it cannot skip.
        """
        self.order = self.order.resized(step, size)
        self.take(self.share)
        self._resized = True

    def load_anew(self) -> None:
        """Load what is loaded already of the steps to come once more: this rank runs other micro-batches in them.

        Not for a stream, which is read once.
        """
        assert self._numbered
        self._resized = True

    def tokens(self, step: int, excluded: Sequence[int]) -> int:
        """Return the tokens of a step's samples without some micro-batches, 0 where nobody says how many they have."""
        order = self.order
        if order.budget is None:
            out = between(order.positions_of(step, excluded), *order.positions(step))
            return length(out) * self.sample_tokens
        return sum(tokens for number, tokens in enumerate(order.tokens_at(step)) if number not in excluded)

    @property
    def cursor(self) -> Cursor | None:
        """The stream's position after `step` steps; None for a map-style data set, and before the first step."""
        return self._cursors.get(self.step)

    def go_on(self, step: int, cursor: Cursor | None, saved: Order | None = None) -> str:
        """Continue after `step` steps, as in the run's state; return what people should know, "" for nothing.

        saved: the order of the state, None for one that no run has made. What was consumed before it stays consumed,
        and what was excluded, excluded.
        """
        self.step = step
        late: Holes = ()
        if saved is not None:
            holes = saved.holes
            self.order = self.order.following(saved, step)
            end = self.order.positions(step)[0]
            late = tuple(part for hole in inside(self.order.holes, 0, end) for part in between(holes, *hole))
            ahead = inside(self.order.holes, end, max((end, *(stop for _, stop in self.order.holes))))
            self.order = replace(self.order, holes=joined((*holes, *ahead))).whole_holes(self.share.leaf, since=step)
            self.take(self.share)
        self._cursors = {step: cursor} if cursor is not None else {}
        if not late:
            return ""
        return f"exclude= names positions that were consumed before step {step}, and stay so: {list(late)}"

    def called(self, samples: Sequence[int]) -> str:
        """Return in words which samples these are, by the names that a data set gives to them."""
        if hasattr(self._dataset, "name_of"):
            return ", ".join(name_of(self._dataset, sample) for sample in samples)
        return f"samples {', '.join(map(str, samples))}"

    def leave_out(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Exclude positions that nobody has tried in this history of the run; whole steps, before any is made."""
        holes = joined(ranges)
        self.order = self.order.excluding(holes)
        self.untried = joined((*self.untried, *holes))

    def exclude(self, step: int, numbers: Iterable[int]) -> Holes:
        """Exclude some micro-batches of a step that is not made yet; return their positions.

        To be called alike on every rank. What is loaded already stays so: it is run, and does not count.
        """
        holes = self.order.positions_of(step, numbers)
        self.order = self.order.excluding(holes)
        return holes

    def counted_anew(self, batch: Batch) -> Batch:
        """Return this rank's part of a step without the micro-batches that have been excluded since it was loaded."""
        excluded = self.order.excluded(batch.step)
        parts = tuple(replace(part, counts=part.counts and part.index not in excluded) for part in batch.micro_batches)
        return self._accounted(replace(batch, micro_batches=parts, excluded=excluded))

    def until(self, step: int) -> Iterator[Batch]:
        """Yield this rank's part of each step from the present one up to, but not including, `step`.

        UsageError where that is no whole number, and where islands would end within a round, with what they learned
        since then merged nowhere.
        """
        check_whole("batches.until", step=step)
        if self.rounds and step % self.rounds:
            raise UsageError(
                f"batches.until(step={step}) ends within a round: islands merge every {self.rounds} steps, and what "
                f"came after would be merged nowhere; take {step - step % self.rounds or self.rounds}"
            )
        self.goal = step if self._stopped is None else min(step, self._stopped)
        self._resized = False
        while self.step < self.goal:
            yield from self._up_to(self.goal if self.reach is None else min(self.goal, self.reach))

    def _up_to(self, stop: int) -> Iterator[Batch]:
        """Yield each step from the present one up to `stop`, or until `goal` or `step` are somewhere else."""
        loaded = self._loaded(self.step, stop)
        try:
            while self.step < min(stop, self.goal):
                before = self.step
                self.progress.loading()
                part = next(loaded)
                self.read = part.read
                if part.cursor is not None:
                    present = self._cursors.get(before, Cursor())
                    self._cursors = {before: present, before + 1: part.cursor}
                batch = self._batch(before, part)
                self.progress.in_script(part.read)
                self._yielded = before
                yield batch
                if self.step != before + 1:
                    raise UsageError(
                        f"run.step was not called once for the batch of step {before}: each batch is one optimizer step"
                    )
                self.stepped()
                if self._resized:
                    loaded.close()
                    self._resized = False
                    loaded = self._loaded(self.step, stop)
        finally:
            loaded.close()

    def example(self) -> Any:
        """Return one collated micro-batch (input, target), to learn shapes from; the same on every rank."""
        return self._source.example(self._keyed)

    @cached_property
    def samples(self) -> str:
        """A digest of the run's first micro-batch, by which nodes, and runs over one state, see if theirs are the same.

        "" for a stream, of which nothing is read for that, and where the micro-batch is another one each time.
        """
        if not self._numbered:
            return ""
        first = digest_of(self._source.again(0, 0, self._keyed))
        again = (digest_of(self._source.again(0, 0, self._keyed)) for _ in range(MADE_AGAIN))
        return first if all(digest == first for digest in again) else ""

    def later_samples(self) -> list[str]:
        """Return digests of micro-batches of some further steps, made twice; "" for one that was another one then.

        Where ranks differ in `samples`: by these it is seen if they do in all, or only now and then.
        """
        made = [
            {digest_of(self._source.again(step, 0, self._keyed)) for _ in range(2)} for step in range(1, 1 + FURTHER)
        ]
        return [next(iter(digests)) if len(digests) == 1 else "" for digests in made]

    def examples(self) -> Iterator[Any]:
        """Yield some further collated micro-batches of the first step, to learn from which shapes there may be.

        Its last one, which a budget makes of the shortest samples, and others; none of a stream, which is read once.
        """
        last = self.order.micro_batches_at(0) - 1
        for index in sorted({1, last // 2, last} - {0}, reverse=True) if self._numbered and last else ():
            yield self._source.again(0, index, self._keyed)

    def again(self, step: int, numbers: Sequence[int]) -> Batch:
        """Return some micro-batches of a step, whosever they are, not to be added up.

        They are loaded anew; of a stream, those that `Share.heard` names are kept of the step that was yielded last.
        """
        count = self.order.micro_batches_at(step)
        pairs = {}
        for index in set(numbers) if self.share.loads else ():
            pair = self._source.again(step, index, self._keyed) if self._numbered else self._kept[index]
            assert pair is not None
            pairs[index] = pair
        parts = [self._part(PASSED_OVER * count + index, index, pairs.get(index)) for index in numbers]
        return Batch(
            step=step,
            count=count,
            sizes=self.order.sizes_at(step),
            micro_batches=tuple(parts),
            samples=0,
            sample_sum=0,
            excluded=self.order.excluded(step),
            summed=False,
        )

    def _loaded(self, first: int, stop: int) -> Generator[Loaded, None, None]:
        pin = self.device.type == "cuda"
        source, cursor = self._source, self.cursor
        if self._closed is not None:
            self._closed.wait()  # it may be in the data set yet
            self._closed = None
        if not self.share.loads and not source.reads_always:
            yield from (Loaded(pairs=[]) for _ in range(first, stop))
        elif self.workers:
            yield from source.worked(first, stop, cursor, self.workers, pin=pin)
        else:
            if self._threaded and first < stop:
                for part in self._ahead(first, stop, cursor, pin=pin):
                    yield part
                    first, cursor = first + 1, part.cursor
            if first < stop:
                yield from source.steps(first, stop, cursor, self._keyed)

    def _ahead(self, first: int, stop: int, cursor: Cursor | None, *, pin: bool) -> Iterator[Loaded]:
        """Load in a thread, until the data set draws random numbers that belong to the model, or the model does.

        It is begun once it is known that the model does not draw from what the thread could draw from.
        """
        draws, finish = Undrawn(), _pinned if pin else _as_it_is
        steps = self._source.steps(first, stop, cursor, draws)
        ahead = None
        try:
            part = next(steps)
            while (model_draws := self.model_draws()) is None:
                yield finish(part)
                part = next(steps)
            if model_draws:
                yield finish(part)
                self._between("the model draws from the global random numbers of numpy or Python in its passes")
                return
            draws.beside = True
            ahead = Ahead(steps, finish)
            yield finish(part)
            yield from ahead
        except StopIteration:
            return
        except Drawn:
            self._between("the data set draws from the global random numbers of torch, numpy or Python")
        finally:
            if ahead is not None:
                ahead.close()
                self._closed = ahead

    def _between(self, why: str) -> None:
        """Make samples between the steps from here on."""
        self._threaded = False
        warnings.warn(
            f"{why}: samples are made between the steps from here on, under seeds by position; run.batches(..., "
            "workers=1) makes them meanwhile, and so it is where all that draws has a generator of its own",
            stacklevel=3,
        )

    def _batch(self, step: int, loaded: Loaded) -> Batch:
        count, self._kept = self.order.micro_batches_at(step), loaded.kept
        excluded = self.order.excluded(step)
        micro_batches = []
        for round_, index in enumerate(self.share.micro_batches(step, count)):
            part = self._part(index, index % count, loaded.pairs[round_] if self.share.loads else None)
            micro_batches.append(replace(part, counts=False) if index in excluded else part)
        batch = Batch(
            step=step,
            count=count,
            sizes=self.order.sizes_at(step),
            micro_batches=tuple(micro_batches),
            samples=0,
            sample_sum=0,
            excluded=excluded,
            turns=self.share.turns(step, count),
        )
        return self._accounted(batch)

    def _accounted(self, batch: Batch) -> Batch:
        """Return a batch with the numbers and sums of the samples that were loaded for it here."""
        samples, sums = [0, 0], [0, 0]
        for part in batch.micro_batches if self.share.loads else ():
            if part.index < batch.count:
                ids = self.order.micro_batch_samples(batch.step, part.index)
                out = part.index in batch.excluded
                samples[out] += len(ids)
                sums[out] = fold_sums((sums[out], self.order.keyed_sum(np.array(ids, dtype=np.uint64))))
        return replace(batch, samples=samples[0], sample_sum=sums[0], excluded_samples=samples[1], excluded_sum=sums[1])

    def _check_holes(self) -> None:
        """Refuse holes that are not of whole micro-batches, or of whole leaves of them."""
        whole = self.order.whole_holes(self.share.leaf)
        if whole != self.order:
            what = "micro-batches" if self.share.leaf == 1 else f"leaves of {self.share.leaf} micro-batches"
            raise UsageError(
                f"run.batches: exclude={list(self.order.holes)} cuts {what} apart, which are left out as wholes; "
                f"exclude={list(whole.holes)} would do"
            )

    def _part(self, index: int, like: int, pair: Pair | None) -> MicroBatch:
        inputs = targets = None
        if pair is not None:
            inputs = moved(pair[0], self.device) if self.share.inputs else None
            targets = moved(pair[1], self.device) if self.share.targets else None
        return MicroBatch(index=index, like=like, counts=index == like, input=inputs, target=targets)


def _sample_tokens(dataset: Any) -> int:
    """Return how many tokens each sample has, as far as the data set says so; 0 if it does not."""
    said = getattr(dataset, "sample_tokens", None)
    if said is None:
        return 0
    if not isinstance(said, int) or isinstance(said, bool) or said < 1:
        raise UsageError(
            f"run.batches: {type(dataset).__name__}.sample_tokens is {said!r}: give the number of tokens of each "
            "sample, 1 or more, or leave it out where samples differ or have none"
        )
    return said


def _pinned(loaded: Loaded) -> Loaded:
    kept = dict(zip(loaded.kept, pinned(list(loaded.kept.values())), strict=True))
    return replace(loaded, pairs=pinned(loaded.pairs), kept=kept)


def _as_it_is(loaded: Loaded) -> Loaded:
    return loaded

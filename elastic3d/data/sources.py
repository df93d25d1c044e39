"""A data set as steps of micro-batches: by number from a map-style one, in turn from a stream."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler
from torch.utils.data._utils import worker

from elastic3d import source_waits
from elastic3d.data import notes
from elastic3d.data.collating import Collating, Pair
from elastic3d.data.dataset_facts import ahead_of, name_of, prefetch
from elastic3d.data.making import Draws, Keyed, naming
from elastic3d.data.positions import Order
from elastic3d.data.streams import Cursor, SampleStream, StreamReader
from elastic3d.owners import Owners, SenderTurn
from elastic3d.values import rounds


def nothing_more(step: int, micro_batches: int) -> Sequence[int]:
    """Return no micro-batches: those that a step runs beyond its own."""
    return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The part of each step's micro-batches that one rank computes.

    dp, index: of the data-parallel axis. shares: of its ranks, as in a layout. leaf: how many micro-batches in a row
    one rank computes. inputs, targets: whether this rank's pipeline stage needs them at all. extra: of (step, M), the
    numbers under which this rank runs micro-batches once more after its own, which do not count: each is at least M
    times the rounds of any step, and equal modulo M to the micro-batch that it repeats. heard: of the same,
    micro-batches that any rank may have to run again within the step: those of a stream are kept, as it is read once.
    """

    dp: int = 1
    index: int = 0
    shares: tuple[int, ...] = ()
    leaf: int = 1
    inputs: bool = True
    targets: bool = True
    extra: Callable[[int, int], Sequence[int]] = nothing_more
    heard: Callable[[int, int], Sequence[int]] = nothing_more

    @property
    def loads(self) -> bool:
        """Whether this rank needs samples."""
        return self.inputs or self.targets

    @property
    def owners(self) -> Owners:
        """Which rank of the axis computes which leaf."""
        return Owners(dp=self.dp, shares=self.shares)

    def leaves(self, micro_batches: int) -> list[int]:
        """Return the leaves that this rank runs in a step, those that repeat others aside.

        With equal shares every rank runs one in each turn: those that the step does not have only fill its last turn.
        """
        own = self.owners.leaves_of(self.index, rounds(micro_batches, self.dp, self.leaf, self.shares) // self.leaf)
        return [leaf for leaf in own if leaf < micro_batches // self.leaf] if self.shares else own

    def rounds(self, micro_batches: int) -> int:
        """Return how many micro-batches this rank runs in a step, those that repeat others aside."""
        return len(self.leaves(micro_batches)) * self.leaf

    def micro_batches(self, step: int, micro_batches: int) -> list[int]:
        """Return the numbers of this rank's micro-batches by round; M and more mark places that do not count."""
        own = [leaf * self.leaf + number for leaf in self.leaves(micro_batches) for number in range(self.leaf)]
        return own + list(self.extra(step, micro_batches))

    def turns(self, step: int, micro_batches: int) -> tuple[SenderTurn, ...]:
        """Return which ranks of the axis send gradients in each turn of a step; () if all do in every one."""
        if not self.shares:
            return ()
        leaves, more = micro_batches // self.leaf, len(self.extra(step, micro_batches)) // self.leaf
        repeated = (SenderTurn.of_all(turn, self.dp, first=leaves) for turn in range(more))
        return (*self.owners.steps_turns(leaves), *repeated)

    def wanted(self, step: int, micro_batches: int) -> list[int]:
        """Return the micro-batch whose samples each round loads; one that does not count takes another's."""
        return [index % micro_batches for index in self.micro_batches(step, micro_batches)] if self.loads else []

    def kept(self, step: int, micro_batches: int) -> set[int]:
        """Return the micro-batches of a stream that this rank keeps to run them again."""
        return set(self.heard(step, micro_batches)) if self.loads else set()


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """One rank's samples of one step, a pair for each round. cursor: of a stream, after the step.

    kept: by their number, micro-batches of a stream that may have to be run again. read: bytes from storage that they
    were made of, as far as who reads them counts.
    """

    pairs: list[Pair]
    cursor: Cursor | None = None
    kept: dict[int, Pair] = field(default_factory=dict)
    read: int = 0


class SampleSource(Protocol):
    """The access to a data set that `Batches` needs."""

    reads_always: bool

    def steps(self, first: int, stop: int, cursor: Cursor | None, draws: Draws) -> Iterator[Loaded]:
        """Load this rank's part of each step, one after the other, in the calling thread."""
        ...

    def worked(self, first: int, stop: int, cursor: Cursor | None, workers: int, *, pin: bool) -> Iterator[Loaded]:
        """Load the same in processes, ahead."""
        ...

    def example(self, draws: Draws) -> Pair:
        """Return the first micro-batch of the run, the same on every rank."""
        ...

    def again(self, step: int, index: int, draws: Draws) -> Pair | None:
        """Return any micro-batch of a step, whosever it is; None where none can be read a second time."""
        ...


class Numbered:
    """A map-style data set."""

    reads_always = False

    def __init__(self, dataset: Any, order: Order, share: Share, collating: Collating) -> None:
        self._dataset, self._order, self._share, self._collating = dataset, order, share, collating
        # A thread may load the next step while a micro-batch of this one is loaded again.
        self._alone = threading.Lock()

    def steps(self, first: int, stop: int, cursor: Cursor | None, draws: Draws) -> Iterator[Loaded]:
        """Load this rank's part of each step."""
        asked = self._asked(first, stop, 1)
        for step in range(first, stop):
            wanted = self._share.wanted(step, self._order.micro_batches_at(step))
            pairs = [self._pair(next(asked), draws) for _ in wanted]
            yield Loaded(pairs=pairs, read=notes.bytes_read())

    def worked(self, first: int, stop: int, cursor: Cursor | None, workers: int, *, pin: bool) -> Iterator[Loaded]:
        """Load in processes forked from the trainer; together they load at least a step ahead."""
        source_waits.clear()
        order, share = self._order, self._share
        begins = [first, *(step for step, _ in order.changes if first < step < stop)]
        most = max(share.rounds(order.micro_batches_at(step)) for step in begins)
        loader: DataLoader[Any] = DataLoader(
            _Sampled(self._dataset, self._order),
            batch_sampler=_Given(self._asked(first, stop, workers)),
            num_workers=workers,
            prefetch_factor=max(2, -(-most // workers)),
            collate_fn=self._carried,
            worker_init_fn=notes.carry,
            pin_memory=pin,
            # A separate generator: the loader draws a seed, and must not draw it from the model's random numbers.
            generator=torch.Generator(),
            multiprocessing_context="fork",
        )
        with _working(loader) as loaded:
            for step in range(first, stop):
                pairs, read = [], 0
                for _ in share.wanted(step, order.micro_batches_at(step)):
                    pair, said, nbytes = next(loaded)
                    notes.log(said)
                    pairs.append(pair)
                    read += nbytes
                yield Loaded(pairs=pairs, read=read)

    def example(self, draws: Draws) -> Pair:
        """Return the first micro-batch of the run."""
        return self._pair(self._places(0, 0), draws)

    def again(self, step: int, index: int, draws: Draws) -> Pair:
        """Return any micro-batch of a step."""
        return self._pair(self._places(step, index), draws)

    def _asked(self, first: int, stop: int, every: int) -> Iterator[list[_Asked]]:
        """Yield the samples of each micro-batch, the first of them with those that the same process is asked for next.

        every: how many processes load, each of them one micro-batch after the other in turn.
        """
        order, ahead = self._order, ahead_of(self._dataset)
        wanted = (
            self._places(step, index)
            for step in range(first, stop)
            for index in self._share.wanted(step, order.micro_batches_at(step))
        )
        if not ahead:
            yield from wanted
            return
        # Where a budget makes micro-batches of several sizes, as many as have about so many samples.
        further = every * -(-ahead * order.micro_batches_at(first) // order.batch_at(first))
        coming = deque(islice(wanted, further + 1))
        while coming:
            numbers = [asked.number for one in islice(coming, 0, None, every) for asked in one]
            head, *rest = coming.popleft()
            yield [replace(head, ahead=tuple(numbers[:ahead])), *rest]
            coming.extend(islice(wanted, 1))

    def _places(self, step: int, index: int) -> list[_Asked]:
        return [_Asked(position, number) for position, number in self._order.micro_batch_places(step, index)]

    def _pair(self, asked: list[_Asked], draws: Draws) -> Pair:
        sampled = _Sampled(self._dataset, self._order)
        with self._alone, draws.around():
            return self._collated([sampled.make(one, draws) for one in asked])

    def _carried(self, named: list[tuple[str, Any]]) -> tuple[Pair, list[notes.Note], int]:
        return self._collated(named), notes.said(), notes.bytes_read()

    def _collated(self, named: list[tuple[str, Any]]) -> Pair:
        return self._collating.pair([sample for _, sample in named], lambda place: named[place][0])


class Streamed:
    """An iterable data set: every rank reads all of it, and keeps its own part."""

    reads_always = True

    def __init__(self, stream: SampleStream, order: Order, share: Share, collating: Collating) -> None:
        self._stream, self._order, self._share, self._collating = stream, order, share, collating

    def steps(self, first: int, stop: int, cursor: Cursor | None, draws: Draws) -> Iterator[Loaded]:
        """Load this rank's part of each step, beginning at the cursor."""
        order, size = self._order, self._order.micro_batch
        reader = StreamReader(self._stream, cursor, position=order.positions(first)[0], draws=draws)
        for step in range(first, stop):
            count = order.micro_batches_at(step)
            wanted, kept = self._share.wanted(step, count), self._share.kept(step, count)
            pairs: dict[int, Pair] = {}
            for index in range(count):
                if index not in wanted and index not in kept:
                    with draws.around():
                        reader.pass_over(size)
                    continue
                start = reader.position
                with draws.around(), naming(lambda: f"step {step}, by the stream's samples"):  # noqa: B023
                    pairs[index] = self._collating.pair(reader.take(size), partial(_name_in_stream, start))
            yield Loaded(
                pairs=[pairs[index] for index in wanted],
                cursor=reader.cursor(),
                kept={index: pairs[index] for index in kept},
                read=notes.bytes_read(),
            )

    def worked(self, first: int, stop: int, cursor: Cursor | None, workers: int, *, pin: bool) -> Iterator[Loaded]:
        """Load two steps ahead in one process, since a stream is read in one place."""
        source_waits.clear()
        loader: DataLoader[Any] = DataLoader(
            _Steps(self, first, stop, cursor, Keyed(self._order.seed, lent=False)),
            batch_size=None,
            num_workers=1,
            worker_init_fn=notes.carry,
            prefetch_factor=2,
            pin_memory=pin,
            generator=torch.Generator(),
            multiprocessing_context="fork",
        )
        with _working(loader) as steps:
            for pairs, reached, kept, said, read in steps:
                notes.log(said)
                yield Loaded(pairs=pairs, cursor=reached, kept=kept, read=read)

    def example(self, draws: Draws) -> Pair:
        """Return the stream's first micro-batch."""
        reader = StreamReader(self._stream, None, position=0, draws=draws)
        with draws.around():
            return self._collating.pair(reader.take(self._order.micro_batch), partial(_name_in_stream, 0))

    def again(self, step: int, index: int, draws: Draws) -> None:
        """Return None: a stream is read once, and `Loaded.kept` has what may be run again."""


def _name_in_stream(begins: int, place: int) -> str:
    return f"sample {begins + place} of the stream"


@dataclass(frozen=True, slots=True)
class _Asked:
    """A sample by its position in the run and its number in the data set. ahead: numbers that are asked for next."""

    position: int
    number: int
    ahead: tuple[int, ...] = ()


class _Sampled(torch.utils.data.Dataset[Any]):
    """The samples of a data set, each with its name."""

    def __init__(self, dataset: Any, order: Order) -> None:
        self._dataset, self._order = dataset, order

    def __getitem__(self, asked: _Asked) -> tuple[str, Any]:
        return self.make(asked, Keyed(self._order.seed, lent=False))

    def make(self, asked: _Asked, draws: Draws) -> tuple[str, Any]:
        position, number = asked.position, asked.number
        if asked.ahead:
            prefetch(self._dataset, asked.ahead)
        name = name_of(self._dataset, number)
        with naming(lambda: f"{name}, at position {position} of the run, in step {self._order.step_at(position)}"):
            draws.before(self._order.place_of(position))
            with source_waits.source(type(self._dataset).__name__):
                return name, self._dataset[number]


@contextmanager
def _working(loader: DataLoader[Any]) -> Iterator[Iterator[Any]]:
    """End a loader's processes after its use; else they live until it is collected, or a traceback that holds it is."""
    items: Any = iter(loader)
    try:
        yield items
    finally:
        items._shutdown_workers()


class _Given(Sampler[list[_Asked]]):
    """Passes the samples of one micro-batch after the other to a DataLoader."""

    def __init__(self, asked: Iterator[list[_Asked]]) -> None:
        self._asked = asked

    def __iter__(self) -> Iterator[list[_Asked]]:
        return self._asked


class _Steps(IterableDataset[Any]):
    """The steps of a stream, as a DataLoader's process reads them."""

    def __init__(self, source: Streamed, first: int, stop: int, cursor: Cursor | None, draws: Draws) -> None:
        self._given = source, first, stop, cursor, draws

    def __iter__(self) -> Iterator[tuple[list[Pair], Cursor | None, dict[int, Pair], list[notes.Note], int]]:
        # One process reads all of the stream; a library that sees a worker, though the only one, may draw otherwise.
        worker._worker_info = None
        source, *rest = self._given
        for loaded in source.steps(*rest):  # type: ignore[arg-type]
            yield loaded.pairs, loaded.cursor, loaded.kept, notes.said(), loaded.read

"""A stream of samples, read by every rank from one cursor that does not depend on ranks.

Sample k of the run is the k-th that the stream gives; a stream that ends is begun again. The cursor after a step is the
position of all ranks in the stream, whichever samples each of them has kept, so any world can go on from it. If the
data set has `state_dict` and `load_state_dict`, or its iterator has, the cursor holds that state too, and no samples
have to be passed over.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from elastic3d import source_waits
from elastic3d.data.foreign_streams import check_same_everywhere, own_state_is_exact
from elastic3d.data.making import Draws, naming
from elastic3d.errors import StateError, UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """A stream's position: samples taken `within` the present epoch, epochs before it, the data set's own state."""

    epoch: int = 0
    within: int = 0
    state: Any = None


def check_stream(dataset: Any) -> None:
    """Refuse objects that are not data sets, or that can be read only once; UsageError."""
    kind = type(dataset).__name__
    if not hasattr(dataset, "__iter__"):
        raise UsageError(
            f"run.batches needs a map-style data set, with len() and [index], or an iterable one; {kind} is neither"
        )
    check_same_everywhere(dataset)
    if hasattr(dataset, "__next__"):
        raise UsageError(
            f"run.batches was given an iterator ({kind}), which can be read only once; give an object whose "
            "__iter__ begins the stream anew"
        )


class SampleStream:
    """A stream's data set, which may be begun anew however often it is read. exact: whether it keeps its own state."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.exact = own_state_is_exact(dataset)
        self._first: tuple[Any] | None = None

    def begin_anew(self) -> None:
        """Have the data set in the state of its own that it had before anything was read of it."""
        if not self.exact:
            return
        if self._first is None:
            self._first = (copy.deepcopy(self.dataset.state_dict()),)
        # The first time, too: data sets of other libraries begin again by themselves if no state is loaded.
        if self._first[0] is not None:  # which `datasets` have until they are read, and begin anew with
            self.dataset.load_state_dict(copy.deepcopy(self._first[0]))


class StreamReader:
    """Reads a stream from a cursor on, across the ends of its epochs. position: of the next sample in the run."""

    def __init__(self, stream: SampleStream, cursor: Cursor | None, *, position: int, draws: Draws) -> None:
        self._dataset, self._exact, self._draws = stream.dataset, stream.exact, draws
        self.position = position
        cursor = cursor or Cursor()
        self._epoch, self._within = cursor.epoch, 0
        with draws.around():
            if cursor.state is None:
                stream.begin_anew()
            begun = bool(cursor.epoch or cursor.within)
            self._samples = self._begin(cursor.state, position - cursor.within if begun else 0)
            if cursor.state is not None:
                self._within = cursor.within
            # Without a cursor, as with an older state that had none, all samples before have to be passed over.
            behind = cursor.within - self._within if begun else position
            self.position -= behind
            self.pass_over(behind)

    def cursor(self) -> Cursor:
        """Return the stream's present position."""
        keeper = self._keeper(self._samples)
        state = copy.deepcopy(keeper.state_dict()) if keeper is not None else None
        return Cursor(epoch=self._epoch, within=self._within, state=state)

    def take(self, count: int) -> list[Any]:
        """Return the next samples."""
        return [self._next() for _ in range(count)]

    def pass_over(self, count: int) -> None:
        """Pass over the next samples: by the iterator's `skip(n)`, if it has one, which returns how many it skipped."""
        skip = getattr(self._samples, "skip", None)
        while count:
            if skip is None:
                self._next()
                count -= 1
                continue
            with naming(self._name):
                passed = skip(count)
            self._within += passed
            self.position += passed
            count -= passed
            if count:
                self._turn()
                skip = self._samples.skip  # type: ignore[attr-defined]

    def _next(self) -> Any:
        while True:
            with naming(self._name):
                self._draws.before(self.position)
                try:
                    with source_waits.source(type(self._dataset).__name__):
                        sample = next(self._samples)
                except StopIteration:
                    self._turn()
                    continue
            self._within += 1
            self.position += 1
            return sample

    def _begin(self, state: Any, first: int) -> Iterator[Any]:
        """Begin the present epoch, or go on in it by a state. first: the position of its first sample.

        What the stream draws for it (an order, say) is seeded by that, as what it draws for a sample is by its own.
        """
        self._draws.before(first)
        if hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(self._epoch)
        if state is not None and self._exact:
            self._dataset.load_state_dict(copy.deepcopy(state))
        samples: Iterator[Any] = iter(self._dataset)
        if state is not None and not self._exact:
            keeper = self._keeper(samples)
            if keeper is None:
                raise StateError(
                    f"the saved state includes one of the data set itself, but {type(self._dataset).__name__} has no "
                    "load_state_dict; give run.batches the data set that was saved"
                )
            keeper.load_state_dict(copy.deepcopy(state))
        return samples

    def _keeper(self, samples: Iterator[Any]) -> Any:
        """Return what keeps the stream's own state: the data set, or else its iterator; None where neither does."""
        if self._exact:
            return self._dataset
        kept = hasattr(samples, "state_dict") and hasattr(samples, "load_state_dict")
        return samples if kept and not hasattr(self._dataset, "state_dict") else None

    def _turn(self) -> None:
        if not self._within:
            raise UsageError(
                f"the stream gave no sample in epoch {self._epoch}: it must hold at least one, and its __iter__ must "
                "begin it anew each time; if it has a state of its own and was read to its end before, make it anew"
            )
        self._epoch += 1
        self._within = 0
        self._samples = self._begin(None, self.position)

    def _name(self) -> str:
        return f"sample {self.position} of the run, which is sample {self._within} of epoch {self._epoch} of the stream"

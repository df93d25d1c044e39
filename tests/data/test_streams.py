from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from elastic3d.data import Batches, Cursor, Growing, Share
from elastic3d.errors import UsageError
from tests.data.streams import Numbers, Skipping, Stateful

SIZES = Growing((0, 6), (2, 10), (4, 8))


def stream(dataset: Any, *, dp: int = 1, index: int = 0, workers: int = 0, loads: bool = True) -> Batches:
    share = Share(dp=dp, index=index, inputs=loads, targets=loads)
    return Batches(dataset, global_batch=SIZES, micro_batch=2, seed=5, share=share, workers=workers)


def read(batches: Batches, until: int) -> dict[int, list[int]]:
    """Return the counted samples by step."""
    samples: dict[int, list[int]] = {}
    for batch in batches.until(step=until):
        parts = [part for part in batch.micro_batches if part.counts]
        samples[batch.step] = [int(x) for part in parts if part.input is not None for x in part.input.flatten()]
        batches.step += 1
    return samples


def test_sample_k_of_the_run_is_sample_k_of_the_stream_under_any_dp() -> None:
    """Every rank reads all and keeps its own; together, each step takes the next samples, across the stream's ends."""
    for dp in (1, 2, 3):
        shares = [read(stream(Numbers(13), dp=dp, index=index), 6) for index in range(dp)]
        flat = [sorted(x for share in shares for x in share[step]) for step in range(6)]
        stops = [0, 6, 12, 22, 32, 40, 48]
        expected = [sorted(k % 13 for k in range(a, b)) for a, b in pairwise(stops)]
        assert flat == expected, dp


@pytest.mark.parametrize("kind", [Numbers, Skipping])
def test_any_rank_can_resume_from_any_ranks_cursor(kind: type[Numbers]) -> None:
    """It is equal on all ranks, also on those that load nothing, and leads to the same next samples."""
    whole = read(stream(kind(13)), 6)
    halves = [stream(kind(13), dp=2, index=index) for index in range(2)]
    for half in halves:
        read(half, 3)
    idle = stream(kind(13), loads=False)
    read(idle, 3)
    cursors = {half.cursor for half in [*halves, idle]}
    assert cursors == {Cursor(epoch=1, within=9)}
    again = stream(kind(13))
    again.go_on(3, cursors.pop())
    assert read(again, 6) == {step: whole[step] for step in (3, 4, 5)}


def test_without_a_cursor_all_earlier_samples_are_read_again() -> None:
    """A state without a cursor has the step, which is enough for a stream that can be read again."""
    again = stream(Numbers(13))
    again.go_on(3, None)
    assert read(again, 6) == {step: row for step, row in read(stream(Numbers(13)), 6).items() if step > 2}


def test_an_iterator_with_skip_makes_only_its_own_samples() -> None:
    """Its `skip(n)` is called to pass over the samples of other ranks and earlier ones."""
    data = Skipping(1000)
    rank = stream(data, dp=2, index=1)
    rank.go_on(3, Cursor(epoch=0, within=22))
    read(rank, 4)
    assert data.made == 6, "micro-batches 1 and 3, and one as padding"


def test_a_data_sets_own_state_is_in_the_cursor() -> None:
    """Whatever depends on earlier samples resumes from that state alone, and nothing is read twice."""
    first = stream(Stateful())
    whole = read(first, 6)
    begun = stream(Stateful(), dp=2, index=1)
    begun.example()
    read(begun, 3)
    assert begun.cursor is not None
    assert begun.cursor.state == {"at": 4, "mixed": begun.cursor.state["mixed"]}
    data = Stateful()
    again = stream(data)
    again.go_on(3, begun.cursor)
    assert read(again, 6) == {step: whole[step] for step in (3, 4, 5)}
    assert data.made == 26


def test_a_step_that_was_begun_and_never_made_is_begun_again() -> None:
    """Also where the order depends on all that was read before."""
    one = stream(Stateful())
    next(one.until(step=6))
    one.example()
    assert read(one, 6) == read(stream(Stateful()), 6)


class Slow(Stateful):
    """The same, which takes its time in the thread that loads ahead, at the 18th sample until it may go on."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.go_on, self.disturbed = threading.Event(), threading.Event(), False

    def __iter__(self) -> Iterator[Any]:
        for sample in super().__iter__():
            if threading.current_thread().name == "elastic3d-samples":
                self.read.set()
                time.sleep(0.05)
                if self.made == 18:
                    self.go_on.wait(60)
                self.read.clear()
            yield sample

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.disturbed |= self.read.is_set()
        super().load_state_dict(state)


def test_a_step_is_loaded_anew_when_the_thread_that_loads_it_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where that takes longer than anybody waits for it at the end: both would move the data set's state."""
    whole = read(stream(Stateful()), 4)
    monkeypatch.setattr("elastic3d.data.ahead.PATIENCE", 0.01)
    data = Slow()
    one = Batches(data, global_batch=6, micro_batch=2, seed=5)
    samples = {}
    for batch in one.until(step=4):
        samples[batch.step] = [int(x) for part in batch.micro_batches for x in part.input.flatten()]
        one.step += 1
        if one.step == 2:
            assert data.read.wait(60)
            threading.Timer(0.2, data.go_on.set).start()
            one.resize(2, 10)
    assert not data.disturbed
    assert samples == whole


def test_a_worker_reads_the_same_and_returns_the_cursor() -> None:
    """One process reads the stream; more would read it more than once."""
    plain, worked = stream(Stateful(), dp=2, index=1), stream(Stateful(), dp=2, index=1, workers=3)
    assert read(plain, 5) == read(worked, 5)
    assert plain.cursor == worked.cursor


def test_an_empty_stream_and_one_that_cannot_restart_are_refused() -> None:
    """Both would wait for ever."""
    with pytest.raises(UsageError, match="gave no sample in epoch 0"):
        read(stream(Numbers(0)), 1)

    class Once:
        def __init__(self) -> None:
            self.samples = iter([(torch.tensor(1), torch.tensor(1))] * 4)

        def __iter__(self) -> Iterator[Any]:
            return self.samples

    with pytest.raises(UsageError, match=r"in epoch 1: .* its __iter__ must begin it anew"):
        read(stream(Once()), 1)


def test_a_torch_iterable_is_a_stream() -> None:
    """IterableDataset has a __getitem__ that only raises, and often a length."""

    class Sized(torch.utils.data.IterableDataset[Any]):
        def __len__(self) -> int:
            return 13

        def __iter__(self) -> Iterator[Any]:
            return iter(Numbers(13))

    assert read(stream(Sized()), 3) == read(stream(Numbers(13)), 3)


@pytest.mark.parametrize("workers", [0, 1])
def test_what_may_be_run_again_is_kept_for_its_step(workers: int) -> None:
    """A stream is read once: any rank can repeat the named micro-batches of the present step, whosever they are."""
    share = Share(dp=3, index=1, heard=lambda step, count: [0, 2] if step == 1 else [])
    batches = Batches(Numbers(), global_batch=6, micro_batch=2, seed=3, share=share, workers=workers)
    whole = Batches(Numbers(), global_batch=6, micro_batch=2, seed=3)
    for mine, all_of_it in zip(batches.until(step=3), whole.until(step=3), strict=True):
        assert [part.index for part in mine.micro_batches] == [1]
        if mine.step == 1:
            again = batches.again(1, [2, 0])
            assert [part.like for part in again.micro_batches] == [2, 0]
            for part in again.micro_batches:
                assert torch.equal(part.input, all_of_it.micro_batches[part.like].input)
        batches.step, whole.step = mine.step + 1, mine.step + 1
    assert batches.cursor == whole.cursor


class Shuffled(Numbers):
    """Its order is drawn when an epoch begins."""

    def __iter__(self) -> Iterator[Any]:
        order = np.random.permutation(self.length)
        return ((torch.tensor([int(number)]), torch.tensor([0])) for number in order)


@pytest.mark.filterwarnings("ignore:the data set draws")
def test_an_order_that_a_stream_draws_is_the_same_on_every_rank_and_after_a_restore() -> None:
    """Whatever the state of its process: it is seeded by the position at which the epoch begins."""
    np.random.seed(1)
    whole = read(stream(Shuffled(13)), 6)
    np.random.seed(2)
    first = stream(Shuffled(13))
    begun = read(first, 3)
    again = stream(Shuffled(13))
    again.go_on(3, first.cursor)
    np.random.seed(3)
    assert {**begun, **read(again, 6)} == whole

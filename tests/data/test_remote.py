"""Samples from an object store, fetched before they are due."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from chaos.servers.s3 import S3Server, s3_server
from chaos.servers.s3_proxy import Do, Harm, s3_proxy
from checkpointing import open_store
from checkpointing.errors import StoreError, StoreNotFound
from elastic3d import Cached, Mixture, Remote, Stratified
from elastic3d.data import Batches, Share
from elastic3d.data.collating import Collating
from elastic3d.data.fetching import Fetcher
from elastic3d.data.sources import Numbered
from elastic3d.errors import UsageError
from tests.data.mixing import Numbers

NUMBER = 20


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    """A server whose bucket has an object for each of the first samples, and one with all of them."""
    with s3_server() as server:
        fill(server.url("data"), server.options)
        yield server


def content(number: int) -> bytes:
    """Return the bytes of a sample, each of another length in an object of its own."""
    return bytes([number]) * (number + 1)


def fill(url: str, options: dict[str, Any]) -> None:
    store = open_store(url, options=options)
    for number in range(NUMBER):
        store.put(f"parts/{number}.bin", content(number))
    store.put("all.bin", b"".join(map(content, range(NUMBER))))


def made(data: bytes) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the length and the sum of a sample's bytes."""
    return torch.tensor(len(data)), torch.tensor(sum(data))


def ranges() -> list[tuple[str, int, int]]:
    starts = [sum(range(number + 1)) for number in range(NUMBER + 1)]
    return [("all.bin", start, stop) for start, stop in itertools.pairwise(starts)]


class Local(Numbers):
    """The same samples, here."""

    def __init__(self) -> None:
        super().__init__(NUMBER)

    def __getitem__(self, index: int) -> Any:
        return made(content(index))


def epochs(dataset: Any, workers: int = 0) -> tuple[list[Any], int]:
    """Return the samples of two epochs, and the bytes that their steps were made of."""
    batches = Batches(dataset, global_batch=4, micro_batch=2, seed=3, workers=workers)
    samples, nbytes = [], 0
    for batch in batches.until(step=2 * NUMBER // 4):
        samples += [(part.input.tolist(), part.target.tolist()) for part in batch.micro_batches]
        nbytes += batches.read
        batches.step += 1
    return samples, nbytes


@pytest.mark.s3
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("whole", [True, False])
def test_objects_and_parts_of_objects_are_samples(s3: S3Server, workers: int, whole: bool) -> None:
    """The same ones as here, from a thread and from processes; every step says how many bytes it was made of."""
    names: list[Any] = [f"parts/{number}.bin" for number in range(NUMBER)] if whole else ranges()
    dataset = Remote(s3.url("data"), names, make=made, options=s3.options, ahead=6)
    assert epochs(dataset, workers) == (epochs(Local())[0], 2 * sum(range(1, NUMBER + 1)))


@pytest.mark.s3
def test_what_is_kept_on_the_disk_is_not_fetched_again(s3: S3Server, tmp_path: Path) -> None:
    """Bytes are read in the first epoch, and for the sample that is compared."""
    dataset = Remote(s3.url("data"), ranges(), make=made, options=s3.options)
    cached = Cached(dataset, tmp_path, version=1, limit="1MB")
    once = sum(range(1, NUMBER + 1))
    samples, nbytes = epochs(cached)
    assert samples == epochs(Local())[0]
    assert once <= nbytes <= once + NUMBER
    assert epochs(Cached(dataset, tmp_path, version=1, limit="1MB"))[1] <= NUMBER


@pytest.mark.s3
@pytest.mark.parametrize("ahead", [0, 32])
def test_samples_that_draw_are_the_same_where_the_store_was_busy(s3: S3Server, ahead: int) -> None:
    """Waits between tries are drawn, too, but from nothing that a sample may be made by."""

    def drawing(data: bytes) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tensor(len(data)), torch.tensor(random.random())

    def drawn(port: int) -> list[Any]:
        options = {**s3.options, "endpoint_url": f"http://127.0.0.1:{port}"}
        data = Remote(s3.url("data"), ranges(), make=drawing, options=options, ahead=ahead)
        with pytest.warns(UserWarning, match="draws from the global random numbers"):
            return epochs(data)[0]

    with s3_proxy(s3.port, [Harm(do=Do.BUSY, method="GET", path="all.bin", times=20, every=3)]) as wire:
        disturbed = drawn(wire.port)
        assert len(wire.done) == 20
    assert disturbed == drawn(s3.port)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_bytes_are_counted_for_every_device(device: str, tmp_path: Path) -> None:
    """Nothing of these samples is a tensor, so that there need be no device."""
    for number in range(4):
        (tmp_path / f"{number}.txt").write_bytes(b"12345")
    texts = Remote(tmp_path, [f"{number}.txt" for number in range(4)], make=lambda data: (str(data), "label"))
    batches = Batches(texts, global_batch=2, micro_batch=1, seed=1, device=torch.device(device))
    read = []
    for _ in batches.until(step=3):
        read.append(batches.read)
        batches.step += 1
    assert read == [10, 10, 10]


def test_a_sample_that_cannot_be_had_is_named(tmp_path: Path) -> None:
    """One that is missing, and one whose object is shorter than it should be; fetched ahead or not."""
    fill(str(tmp_path), {})
    for ahead in (0, 4):
        names: list[Any] = ["parts/1.bin", "parts/none.bin", ("parts/2.bin", 1, 9)]
        dataset = Remote(tmp_path, names, make=made, ahead=ahead)
        dataset.prefetch([0, 1, 2])
        assert dataset[0] == made(content(1))
        with pytest.raises(StoreNotFound):
            dataset[1]
        with pytest.raises(StoreError, match=r"parts/2.bin bytes 1 to 9: the object ends after 2 of these 8 bytes"):
            dataset[2]
    with pytest.raises(StoreError) as raised:
        epochs(dataset)
    assert f"{tmp_path}/parts" in "".join(raised.value.__notes__)


class Wishes(Numbers):
    """Numbers that note what they were told would come next."""

    ahead = 5

    def __init__(self, number: int = NUMBER) -> None:
        super().__init__(number)
        self.told: list[tuple[int, ...]] = []
        self.asked: list[int] = []
        self.labels = [each % 2 for each in range(number)]

    def prefetch(self, numbers: Sequence[int]) -> None:
        self.told.append(tuple(numbers))

    def __getitem__(self, index: int) -> Any:
        self.asked.append(index)
        return super().__getitem__(index)


@pytest.mark.parametrize("kind", ["plain", "stratified", "mixture", "cached"])
def test_the_samples_that_come_next_are_told_in_time(kind: str, tmp_path: Path) -> None:
    """Before each micro-batch, in the numbers of the data set that has them: those of it, and then those after it."""
    inner, later = Wishes(), [(0, {"this": 1.0}), (9_000, {"other": 1.0})]
    dataset: Any = inner
    if kind == "stratified":
        dataset = Stratified(inner, labels=inner.labels)
    elif kind == "mixture":
        dataset = Mixture({"other": Numbers(NUMBER), "this": inner}, weights=later)
    elif kind == "cached":
        dataset = Cached(inner, tmp_path, version=1, limit="1MB")
    epochs(dataset)
    asked = inner.asked
    for turn, told in enumerate(inner.told):
        if kind != "cached":
            assert told == tuple(asked[2 * turn : 2 * turn + 5])
        else:
            assert not set(told) & set(asked[: 2 * turn])


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_each_process_is_told_its_own_samples(processes: int) -> None:
    """Of several that load in turn, each asks for what it will load itself; together for every sample, in order."""
    order = Batches(Wishes(), global_batch=4, micro_batch=2, seed=3).order
    asked = list(Numbered(Wishes(), order, Share(), Collating())._asked(0, 10, processes))
    for turn, micro_batch in enumerate(asked):
        own = [one.number for later in asked[turn::processes] for one in later]
        assert micro_batch[0].ahead == tuple(own[:5])
        assert not micro_batch[1].ahead


def test_no_more_is_held_than_was_allowed() -> None:
    """However many come next: those beyond are fetched when they come near, and what is wanted no more is let go."""
    fetched: list[int] = []
    gate, begun = threading.Semaphore(0), threading.Semaphore(0)

    def fetch(number: int) -> bytes:
        begun.release()
        assert gate.acquire(timeout=60)
        fetched.append(number)
        return bytes([number])

    fetcher = Fetcher(fetch, 3)
    fetcher.want([1, 2, 3, 4, 5])
    for _ in range(3):
        assert begun.acquire(timeout=60)
    assert not begun.acquire(blocking=False)
    gate.release(3)
    assert [fetcher.get(number) for number in (1, 2, 3)] == [b"\x01", b"\x02", b"\x03"]
    assert sorted(fetched) == [1, 2, 3]
    fetcher.want([4, 5, 6])
    fetcher.want([6, 7])
    gate.release(9)
    assert fetcher.get(6) == b"\x06"
    assert fetcher.get(9) == b"\x09"
    assert set(fetcher._coming) == {7}


def test_an_error_is_raised_for_its_sample_alone() -> None:
    """And the threads go on."""

    def fetch(number: int) -> bytes:
        if number == 2:
            raise OSError("the store is gone")
        return bytes([number])

    fetcher = Fetcher(fetch, 1)
    for number in (1, 2, 3, 2, 4):
        fetcher.want([number])
        if number == 2:
            with pytest.raises(OSError, match="the store is gone"):
                fetcher.get(number)
        else:
            assert fetcher.get(number) == bytes([number])


@pytest.mark.parametrize(
    ("samples", "says"),
    [
        ([], "names no sample"),
        (["a", 7], "sample 1 is 7"),
        (["../a"], r"sample 0 is '../a'"),
        ([("a", 3, 3)], r"sample 0 is \('a', 3, 3\); give .* 0 <= start < stop"),
        ([("a", 0)], "sample 0 is"),
        ([("a", 0, -1)], "sample 0 is"),
    ],
)
def test_samples_are_checked_when_they_are_given(samples: list[Any], says: str) -> None:
    """Not when each is due."""
    with pytest.raises(UsageError, match=says):
        Remote("s3://bucket/data", samples, make=made)


def test_options_are_checked_when_they_are_given() -> None:
    """And a URL that nothing can open, when the first sample is asked for."""
    wrong: list[dict[str, Any]] = [{"ahead": -1}, {"patience": "soon"}, {"make": "torch"}]
    for options in wrong:
        with pytest.raises(UsageError, match=next(iter(options))):
            Remote("s3://bucket/data", ["a"], **{"make": made, **options})
    with pytest.raises(UsageError, match="Remote: store"):
        Remote("nothing://bucket", ["a"], make=made)[0]

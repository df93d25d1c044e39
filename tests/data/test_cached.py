"""Samples that are kept on a disk: the same ones as without, whatever happens to the disk and to who writes."""

from __future__ import annotations

import os
import pickle
import resource
import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from chaos.machine.processes import wait_until
from elastic3d import Cached, Mixture, Stratified
from elastic3d.data import Batches
from elastic3d.data.sample_folder import SampleFolder
from elastic3d.errors import UsageError
from elastic3d.log import observe_process

NUMBER = 24


class Images:
    """Samples that take long to make; `made` says which were, in all processes that append to one file."""

    fingerprint = "images 7"

    def __init__(self, record: Path, *, number: int = NUMBER, shift: int = 0, size: int = 64) -> None:
        self.record, self.number, self.shift, self.size = record, number, shift, size
        self.labels = [each % 2 for each in range(number)]

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self.number:
            raise IndexError(index)
        with open(self.record, "a") as file:
            file.write(f"{index}\n")
        generator = torch.Generator().manual_seed(index + self.shift)
        image = torch.rand(self.size, 2, 3, generator=generator).permute(2, 0, 1)
        return {"image": image, "words": [index, 2], "labels": index}

    @property
    def made(self) -> list[int]:
        """The numbers of the samples made since this was last asked."""
        text = self.record.read_text() if self.record.exists() else ""
        self.record.unlink(missing_ok=True)
        return [int(line) for line in text.split()]


class Augmented(Images):
    """Samples with noise from a global generator."""

    def __init__(self, record: Path, kind: str) -> None:
        super().__init__(record)
        self.kind = kind

    def __getitem__(self, index: int) -> Any:
        sample = super().__getitem__(index)
        noise = torch.rand(1).item() if self.kind == "torch" else np.random.rand()
        return {**sample, "noise": torch.tensor(noise)}


@pytest.fixture
def images(tmp_path: Path) -> Images:
    return Images(tmp_path / "made")


@pytest.fixture
def events() -> Iterator[list[tuple[str, Mapping[str, Any]]]]:
    """What this process's log says."""
    seen: list[tuple[str, Mapping[str, Any]]] = []
    observe_process(lambda name, fields: seen.append((name, dict(fields))))
    yield seen
    observe_process(None)


def cached(dataset: Any, tmp_path: Path, **options: Any) -> Cached:
    return Cached(dataset, tmp_path / "cache", **{"version": 1, "limit": "10MB", **options})


def files(tmp_path: Path) -> list[Path]:
    """Return the files of all samples."""
    return sorted(path for path in (tmp_path / "cache").glob("*/??/*"))


def counted(tmp_path: Path) -> int:
    """Return the bytes that are counted."""
    return sum(int.from_bytes(path.read_bytes(), "little") for path in (tmp_path / "cache").glob("*/bytes"))


def epoch(dataset: Any, workers: int = 0) -> list[Any]:
    """Return two epochs' batches of one rank."""
    made = Batches(dataset, global_batch=6, micro_batch=3, seed=5, workers=workers)
    parts = []
    for batch in made.until(step=2 * NUMBER // 6):
        parts += [(part.input, part.target) for part in batch.micro_batches]
        made.step += 1
    return parts


def equal(one: list[Any], other: list[Any]) -> bool:
    """Whether batches have the same bits and strides."""
    for (first, target), (second, other_target) in zip(one, other, strict=True):
        alike = torch.equal(first["image"], second["image"]) and first["image"].stride() == second["image"].stride()
        if not (alike and torch.equal(first["words"], second["words"]) and torch.equal(target, other_target)):
            return False
    return True


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_those_without_a_cache_and_each_sample_is_made_once(
    images: Images, tmp_path: Path, workers: int
) -> None:
    """In the first epoch, in further ones, and in another run, which makes one sample again to compare it."""
    plain = epoch(images)
    assert len(images.made) >= 2 * NUMBER
    assert equal(epoch(cached(images, tmp_path), workers), plain)
    made = images.made
    # Two processes may make one sample at the same time, and each compares the first that it finds.
    assert set(made) == set(range(NUMBER))
    assert len(made) <= NUMBER + 3
    assert equal(epoch(cached(images, tmp_path), workers), plain)
    assert len(images.made) <= 3
    assert counted(tmp_path) == sum(path.stat().st_size for path in files(tmp_path))


def test_the_cache_shows_what_the_data_set_has(images: Images, tmp_path: Path) -> None:
    """Its fingerprint, so that a run may go on with the cache or without; labels, for example, to stratify by."""
    data = cached(images, tmp_path)
    assert Batches(data, global_batch=2, micro_batch=2, seed=1).fingerprint == "images 7"
    assert len(Stratified(data, labels=data.labels)) == NUMBER
    assert len(pickle.loads(pickle.dumps(data))) == NUMBER
    assert not hasattr(data, "name_of")


@pytest.mark.parametrize("harm", [lambda data: data[:-7], lambda data: b"", lambda data: data[:50] + b"x" + data[51:]])
def test_a_damaged_file_is_made_again(
    images: Images, tmp_path: Path, events: list[Any], harm: Callable[[bytes], bytes]
) -> None:
    """Cut off, emptied, or with one byte changed; said once, however many there are."""
    data = cached(images, tmp_path)
    before = [data[index] for index in range(4)]
    for path in files(tmp_path):
        path.write_bytes(harm(path.read_bytes()))
    images.made  # noqa: B018
    again = cached(images, tmp_path)
    assert all(torch.equal(again[index]["image"], before[index]["image"]) for index in range(4))
    assert images.made == [0, 1, 2, 3]
    assert [name for name, _ in events] == ["sample.remade"]
    assert events[0][1]["sample"] == "sample 0 of the data set"
    assert [again[index]["labels"] for index in range(4)] == [0, 1, 2, 3]


def test_a_file_in_the_place_of_another_sample_is_no_sample(images: Images, tmp_path: Path, events: list[Any]) -> None:
    """Its digest covers its number."""
    data = cached(images, tmp_path)
    first, second = data[0], data[1]
    one, other = files(tmp_path)
    one.write_bytes(other.read_bytes())
    assert data[0]["labels"] == first["labels"] != second["labels"]
    assert [name for name, _ in events] == ["sample.remade"]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["torch", "numpy"])
def test_samples_that_draw_are_not_kept(tmp_path: Path, events: list[Any], kind: str, workers: int) -> None:
    """They differ from epoch to epoch, with the cache as without."""

    def noises(dataset: Any) -> list[float]:
        return [noise for inputs, _ in epoch(dataset, workers) for noise in inputs["noise"].tolist()]

    images = Augmented(tmp_path / "made", kind)
    if workers:
        assert noises(cached(images, tmp_path)) == noises(images)
    else:
        with pytest.warns(UserWarning, match="draws from the global"):
            assert noises(cached(images, tmp_path)) == noises(images)
    assert not files(tmp_path)
    assert [name for name, _ in events] == ["samples.uncached"]
    assert "random numbers were drawn" in events[0][1]["detail"]


def test_another_version_finds_nothing_and_a_changed_data_set_is_found_out(images: Images, tmp_path: Path) -> None:
    """The first sample that is found is made again: with the wrong one a run would train on what nobody makes."""
    assert cached(images, tmp_path)[3]["labels"] == 3
    changed = Images(images.record, shift=1)
    with pytest.raises(UsageError, match=r"sample 3 .* give another version= than 1"):
        cached(changed, tmp_path)[3]
    assert torch.equal(cached(changed, tmp_path, version=2)[3]["image"], changed[3]["image"])


def test_samples_of_other_kinds_are_made_each_time(tmp_path: Path, events: list[Any]) -> None:
    """And the event says which part of which sample it is."""

    class Odd(Images):
        def __getitem__(self, index: int) -> Any:
            return {**super().__getitem__(index), "seen": {index}}

    data = cached(Odd(tmp_path / "made"), tmp_path)
    assert [data[2]["seen"], data[2]["seen"], data[3]["seen"]] == [{2}, {2}, {3}]
    assert [(name, fields["detail"]) for name, fields in events] == [
        (
            "samples.uncached",
            "sample 2 of the data set cannot be kept, and is made each time: 'seen' of the sample is builtins.set",
        )
    ]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_folder_that_cannot_be_used_is_said_once(
    images: Images, tmp_path: Path, events: list[Any], workers: int
) -> None:
    """Training goes on, and all samples are made."""
    (tmp_path / "cache").write_text("a file")
    assert equal(epoch(cached(images, tmp_path), workers), epoch(images))
    assert [name for name, _ in events] == ["samples.uncached"]


def test_a_disk_that_takes_no_more_is_said_once_and_what_it_has_is_used(
    images: Images, tmp_path: Path, events: list[Any]
) -> None:
    """The kernel refuses to write files of a sample's size, as it does on a full disk; nothing is left over."""
    data = cached(images, tmp_path)
    before = data[0]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (256, limits[1]))
    try:
        made = [data[index]["labels"] for index in range(4)]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert made == [0, 1, 2, 3]
    assert torch.equal(data[0]["image"], before["image"])
    assert [name for name, _ in events] == ["samples.uncached"]
    (left,) = files(tmp_path)
    assert counted(tmp_path) == left.stat().st_size
    assert not list((tmp_path / "cache").glob("*/parts/*"))


def test_the_limit_holds_and_what_is_there_stays(images: Images, tmp_path: Path, events: list[Any]) -> None:
    """Each epoch gets the samples that are there, which a cache that kept the newest would have pushed out."""
    data = cached(images, tmp_path, limit=9_000)
    for _ in range(2):
        for index in range(NUMBER):
            assert data[index]["labels"] == index
    kept = {int(path.name) for path in files(tmp_path)}
    assert kept == set(range(9_000 // files(tmp_path)[0].stat().st_size))
    assert counted(tmp_path) == sum(path.stat().st_size for path in files(tmp_path)) <= 9_000
    assert [(name, fields["detail"][:13]) for name, fields in events] == [("samples.uncached", "its limit of ")]


def test_room_is_made_of_what_nobody_uses_longest_first(images: Images, tmp_path: Path, events: list[Any]) -> None:
    """A version in use, here by this process, stays whole."""
    for version in (1, 2):
        data = cached(images, tmp_path, version=version)
        assert [data[index]["labels"] for index in range(2)] == [0, 1]
        folder = next(path for path in (tmp_path / "cache").iterdir() if path.name == data._set)
        os.utime(folder / "used", (version, version))
        del data
    used = cached(images, tmp_path, version=3)
    assert used[0]["labels"] == 0
    size = files(tmp_path)[0].stat().st_size
    new = cached(images, tmp_path, version=4, limit=6 * size)
    assert [new[index]["labels"] for index in range(2)] == [0, 1]
    assert {path.name for path in (tmp_path / "cache").iterdir()} >= {used._set, new._set}
    assert counted(tmp_path) == 5 * size
    assert [new[index]["labels"] for index in range(2, 6)] == [2, 3, 4, 5]
    assert counted(tmp_path) == 6 * size
    assert {path.parent.parent.name for path in files(tmp_path)} == {used._set, new._set}
    assert [name for name, _ in events] == ["samples.uncached"]


def test_a_smaller_limit_begins_the_set_anew(images: Images, tmp_path: Path) -> None:
    """What was kept under the larger one is more than may be there."""
    data = cached(images, tmp_path)
    assert [data[index]["labels"] for index in range(8)] == list(range(8))
    del data
    small = cached(images, tmp_path, limit=5_000)
    assert small[9]["labels"] == 9
    assert [path.name for path in files(tmp_path)] == ["9"]


def test_a_writer_that_is_killed_leaves_whole_samples_only(tmp_path: Path) -> None:
    """SIGKILL while a file is being written: what was linked is whole, and the next one to come tidies up."""
    folder, data = tmp_path / "cache", os.urandom(8 << 20)
    for _ in range(5):
        if not (pid := os.fork()):
            place = SampleFolder(folder, "set", 1 << 40)
            for number in range(1000):
                place.put(number, data)
            os._exit(1)
        try:
            assert wait_until(lambda: bool(list(folder.glob("set/parts/*"))), 60)
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    place = SampleFolder(folder, "set", 1 << 40)
    assert not list(folder.glob("set/parts/*"))
    kept = [int(path.name) for path in folder.glob("set/??/*")]
    for number in kept:
        found = place.get(number)
        assert found is not None
        assert found.numpy().tobytes() == data
    # Each kill may lose the count of one file that was not begun yet, to the safe side.
    size = 32 + len(data)
    assert len(kept) * size <= counted(tmp_path) <= (len(kept) + 5) * size


def test_many_processes_fill_one_folder_together(images: Images, tmp_path: Path) -> None:
    """Each makes and reads all samples at once; each sample is there once, and counted once."""
    plain = [images[index]["image"] for index in range(NUMBER)]
    data = cached(images, tmp_path)
    children = []
    for _ in range(4):
        if not (pid := os.fork()):
            right = all(torch.equal(data[index]["image"], plain[index]) for _ in range(2) for index in range(NUMBER))
            os._exit(0 if right else 1)
        children.append(pid)
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children] == [0] * 4
    assert len(files(tmp_path)) == NUMBER
    assert counted(tmp_path) == sum(path.stat().st_size for path in files(tmp_path))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"version": ""}, "give another one whenever that changes"),
        ({"version": None}, "version=None"),
        ({"limit": "much"}, "Cached: limit='much': give bytes"),
    ],
)
def test_options_are_checked_where_they_are_given(
    images: Images, tmp_path: Path, options: dict[str, Any], says: str
) -> None:
    """Before any sample is made."""
    with pytest.raises(UsageError, match=says):
        cached(images, tmp_path, **options)


def test_a_folder_of_nobody_is_refused(images: Images) -> None:
    """Who is meant by it must be known on this machine."""
    with pytest.raises(UsageError, match="folder='~nobody-here/samples': this machine knows no such user"):
        Cached(images, "~nobody-here/samples", version=1, limit="1MB")


def test_only_what_is_read_by_number_is_kept(images: Images, tmp_path: Path) -> None:
    """Streams, and data sets that decide the order, are refused with what to do; so is a folder that is a URL."""
    with pytest.raises(UsageError, match="map-style data set"):
        cached(iter([1]), tmp_path)
    for inner in (Stratified(images, labels=images.labels), Mixture({"a": images}, weights={"a": 1.0})):
        with pytest.raises(UsageError, match=r"wrap the data sets in it: \w+\(Cached\("):
            cached(inner, tmp_path)
    with pytest.raises(UsageError, match="must be a folder"):
        Cached(images, "s3://bucket/x", version=1, limit=1)
    with pytest.raises(IndexError):
        cached(images, tmp_path)[NUMBER]

"""Data sets of other libraries as sources: any world goes on at the next sample, and what looks at ranks is refused."""

from __future__ import annotations

import io
import json
import sys
import tarfile
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from elastic3d.data import Batches, Share
from elastic3d.errors import UsageError

datasets = pytest.importorskip("datasets", reason="pip install 'elastic3d[dev]'")
webdataset = pytest.importorskip("webdataset")
nodes = pytest.importorskip("torchdata.nodes")
stateful_dataloader = pytest.importorskip("torchdata.stateful_dataloader")

STEPS = 14
ROWS = 26


def batches(dataset: Any, *, dp: int = 1, index: int = 0, workers: int = 0) -> Batches:
    share = Share(dp=dp, index=index)
    return Batches(dataset, global_batch=6, micro_batch=2, seed=5, share=share, workers=workers)


def read(one: Batches, until: int = STEPS) -> dict[int, list[int]]:
    """Return the first number of each counted sample, by step."""
    samples: dict[int, list[int]] = {}
    for batch in one.until(step=until):
        parts = [part.input for part in batch.micro_batches if part.counts]
        numbers = [part["input_ids"][:, 0] if isinstance(part, dict) else part.flatten() for part in parts]
        samples[batch.step] = [int(number) for part in numbers for number in part]
        one.step += 1
    return samples


def table() -> Any:
    return datasets.Dataset.from_dict(
        {"input_ids": [[row, row + 1] for row in range(ROWS)], "labels": [[row, 0] for row in range(ROWS)]}
    )


def plain() -> Any:
    return table().to_iterable_dataset(num_shards=3)


def mapped() -> Any:
    return (
        plain()
        .map(lambda rows: {"labels": rows["labels"]}, batched=True, batch_size=4)
        .filter(lambda row: row["input_ids"][0] % 5 != 3)
    )


def shuffled() -> Any:
    return plain().shuffle(seed=3, buffer_size=5)


def mixed() -> Any:
    return datasets.interleave_datasets([plain(), plain()], probabilities=[0.3, 0.7], seed=2)


class Remembering(IterableDataset[Any]):
    """Its iterator keeps the state, as torchdata's StatefulDataLoader has it: order depends on what came before."""

    def __init__(self) -> None:
        self.passed = 0

    def __iter__(self) -> Any:
        return _Remembering(self)


class _Remembering:
    def __init__(self, owner: Remembering) -> None:
        self.owner, self.at, self.mixed = owner, 0, 1

    def __iter__(self) -> _Remembering:
        return self

    def __next__(self) -> Any:
        if self.at >= ROWS:
            raise StopIteration
        self.owner.passed += 1
        self.at, self.mixed = self.at + 1, (self.mixed * 31 + self.at) % 1009
        return torch.tensor(self.mixed), torch.tensor(0)

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at, "mixed": self.mixed}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at, self.mixed = state["at"], state["mixed"]


def of_nodes() -> Any:
    rows = nodes.IterableWrapper(list(range(ROWS)))
    return nodes.Loader(nodes.Mapper(rows, lambda row: (torch.tensor(row), torch.tensor(0))))


STREAMS = {
    "datasets": plain,
    "datasets, mapped and filtered": mapped,
    "datasets, a shuffle buffer": shuffled,
    "datasets, interleaved": mixed,
    "torchdata, its iterator's state": Remembering,
    "torchdata, nodes": of_nodes,
}


@pytest.mark.parametrize(
    ("make", "workers"),
    [
        *(pytest.param(make, 0, id=name) for name, make in STREAMS.items()),
        *(
            pytest.param(make, 1, id=f"{name}, in a process", marks=pytest.mark.long)
            for name, make in STREAMS.items()
            if name not in ("datasets, interleaved", "torchdata, nodes")
        ),
        pytest.param(mixed, 1, id="datasets, interleaved, in a process"),
    ],
)
def test_any_world_goes_on_at_the_next_sample(make: Callable[[], Any], workers: int) -> None:
    """In the middle of an epoch, at its end and after it; by a state that JSON holds, on a data set made anew."""
    whole = read(batches(make(), workers=workers))
    assert [sorted(whole[step]) for step in (0, 1)] != [sorted(whole[step]) for step in (1, 0)]
    assert read(batches(make()), 3) == {step: whole[step] for step in range(3)}
    for stop in (2, 5, 9) if not workers else (2, 9):
        halves = [batches(make(), dp=2, index=index, workers=workers) for index in range(2)]
        for half in halves:
            half.example()
            read(half, stop)
        cursor = halves[0].cursor
        assert cursor == halves[1].cursor
        assert cursor is not None
        assert json.loads(json.dumps(cursor.state)) == cursor.state
        again = batches(make(), workers=workers)
        again.go_on(stop, cursor)
        assert read(again) == {step: whole[step] for step in range(stop, STEPS)}


@pytest.mark.parametrize("make", STREAMS.values(), ids=STREAMS)
def test_what_was_read_to_learn_shapes_is_read_again(make: Callable[[], Any]) -> None:
    """However often, and also a step that was begun and never made."""
    whole = read(batches(make()), 3)
    one = batches(make())
    for _ in range(3):
        one.example()
    next(one.until(step=3))
    assert read(one, 3) == whole


@pytest.mark.parametrize("make", STREAMS.values(), ids=STREAMS)
def test_a_stream_that_the_script_has_looked_into_begins_at_one_place(make: Callable[[], Any]) -> None:
    """Also where shapes are learnt from it, on some ranks alone: the others would train on other samples."""

    def looked_into() -> Any:
        stream = make()
        next(iter(stream))
        return stream

    whole = read(batches(looked_into()), 3)
    one = batches(looked_into())
    one.example()
    assert read(one, 3) == whole


def test_two_ranks_share_what_one_would_read() -> None:
    """Each reads all of the stream, and keeps its own part."""
    whole = read(batches(plain()))
    parts = [read(batches(plain(), dp=2, index=index)) for index in range(2)]
    assert {step: sorted(parts[0][step] + parts[1][step]) for step in whole} == {
        step: sorted(numbers) for step, numbers in whole.items()
    }


def test_a_state_of_the_iterator_spares_what_came_before() -> None:
    """No samples are passed over."""
    one = batches(Remembering())
    read(one, 3)
    again, source = Remembering(), one.cursor
    resumed = batches(again)
    resumed.go_on(3, source)
    read(resumed, 4)
    assert again.passed <= 3 * 6


def test_a_map_style_data_set_is_shuffled_by_position() -> None:
    """Each row once in an epoch, whatever the number of ranks; its format is kept."""
    rows = read(batches(table().with_format("torch")), 13)
    assert sorted(number for step in range(4) for number in rows[step])[:24] == sorted(
        number for step in range(4) for number in rows[step]
    )
    assert len({number for step in range(4) for number in rows[step]}) == 24
    parts = [read(batches(table(), dp=2, index=index), 13) for index in range(2)]
    assert {step: sorted(parts[0][step] + parts[1][step]) for step in rows} == {
        step: sorted(numbers) for step, numbers in rows.items()
    }


def of_files(folder: Path, **more: Any) -> Any:
    with tarfile.open(folder / "part.tar", "w") as tar:
        for row in range(ROWS):
            data = str(row).encode()
            info = tarfile.TarInfo(f"{row:04}.txt")
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    made = webdataset.WebDataset(str(folder / "part.tar"), shardshuffle=False, **more)
    return made.map(lambda row: (torch.tensor(int(row["txt"])), torch.tensor(0)))


def test_a_webdataset_that_looks_at_no_rank_is_a_stream(tmp_path: Path) -> None:
    """With nodesplitter=None."""
    whole = read(batches(of_files(tmp_path, nodesplitter=None)))
    again = batches(of_files(tmp_path, nodesplitter=None))
    read(again, 5)
    other = batches(of_files(tmp_path, nodesplitter=None))
    other.go_on(5, again.cursor)
    assert read(other) == {step: whole[step] for step in range(5, STEPS)}


@pytest.mark.parametrize("splitter", ["split_by_node", "single_node_only"])
def test_a_webdataset_that_splits_by_node_is_refused(splitter: str, tmp_path: Path) -> None:
    """By the stage's name, which is there by default."""
    chosen = {} if splitter == "single_node_only" else {"nodesplitter": getattr(webdataset, splitter)}
    with pytest.raises(UsageError, match=rf"nodesplitter={splitter} chooses .* give it nodesplitter=None"):
        batches(of_files(tmp_path, **chosen))


def test_a_data_set_that_was_split_by_node_is_refused() -> None:
    """Of `datasets`; elastic3d keeps each rank's part itself."""
    from datasets.distributed import split_dataset_by_node

    with pytest.raises(UsageError, match=r"split_dataset_by_node chooses .* leave that call out"):
        batches(split_dataset_by_node(plain(), rank=0, world_size=2))


def test_a_shuffle_without_a_seed_is_refused() -> None:
    """Each process would have another order, also under a map."""
    with pytest.raises(UsageError, match=r"shuffle\(seed=17\)"):
        batches(plain().shuffle(buffer_size=5).map(lambda row: row))


def test_a_loader_is_refused_with_what_to_give() -> None:
    """It makes batches of its own."""
    for loader, name in (
        (stateful_dataloader.StatefulDataLoader(table(), batch_size=2), "StatefulDataLoader"),
        (DataLoader(table()), "DataLoader"),
    ):
        with pytest.raises(UsageError, match=rf"given a {name}, .*run.batches\(loader.dataset, collate="):
            batches(loader)
        assert read(batches(loader.dataset), 1)


@pytest.mark.parametrize(
    ("package", "kind"),
    [("streaming", "StreamingDataset"), ("litdata", "StreamingDataset"), ("litdata", "CombinedStreamingDataset")],
)
def test_data_sets_that_shard_by_rank_are_refused_by_name(package: str, kind: str) -> None:
    """Also a class over theirs, with length and index; they are known by where their classes are from."""
    module = types.ModuleType(f"{package}.base")
    sys.modules[module.__name__] = module
    try:
        theirs = type(kind, (IterableDataset,), {"__module__": module.__name__, "__iter__": lambda self: iter(())})
        own = type("Own", (theirs,), {"__len__": lambda self: 4, "__getitem__": lambda self, number: (number, number)})
        for dataset in (theirs(), own()):
            with pytest.raises(UsageError, match=rf"{kind} chooses its samples by rank"):
                batches(dataset)
    finally:
        del sys.modules[module.__name__]

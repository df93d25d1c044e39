"""What a loader waits for is in the trainer's page, for the keeper to read while nothing moves."""

from __future__ import annotations

import contextlib
import mmap
import multiprocessing
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from chaos.machine.processes import wait_until
from checkpointing.errors import StoreError
from elastic3d import Remote, source_waits
from elastic3d.data import Batches
from elastic3d.health.phases import Phase
from elastic3d.health.record import SIZE, ProgressWriter, parse


class Trainer:
    """This process as a trainer with a page."""

    def __init__(self) -> None:
        self.memory = mmap.mmap(-1, SIZE)
        self.progress = ProgressWriter(memoryview(self.memory))
        source_waits.record_in(self.progress.awaited)

    @property
    def source(self) -> str:
        record = parse(self.memory[:])
        assert record is not None
        return record.source

    def loads(self, dataset: Any, workers: int) -> threading.Thread:
        """Wait for the first batch in a thread."""
        batches = Batches(dataset, global_batch=2, micro_batch=2, seed=1, workers=workers, progress=self.progress)

        def load() -> None:
            with contextlib.suppress(StoreError):
                next(batches.until(step=1))

        thread = threading.Thread(target=load)
        thread.start()
        return thread


@pytest.fixture
def trainer() -> Iterator[Trainer]:
    yield Trainer()
    source_waits.record_in(None)


class Held:
    """Samples that come when they are let go."""

    def __init__(self) -> None:
        self.go = multiprocessing.get_context("fork").Event()

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        assert self.go.wait(120)
        return torch.tensor(index), torch.tensor(index)


class HeldStream(torch.utils.data.IterableDataset[Any]):
    """The same as a stream."""

    def __init__(self) -> None:
        self.held = Held()
        self.go = self.held.go

    def __iter__(self) -> Iterator[Any]:
        return (self.held[number] for number in range(8))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", [Held, HeldStream])
def test_the_data_set_that_is_waited_for_is_named(trainer: Trainer, kind: Any, workers: int) -> None:
    """By its class, from the trainer's thread and from loaders' processes; no more once it gives samples."""
    dataset = kind()
    thread = trainer.loads(dataset, workers)
    try:
        assert wait_until(lambda: trainer.source == kind.__name__, 60)
    finally:
        dataset.go.set()
        thread.join(60)
    trainer.progress.loading()
    assert trainer.source == ""


def test_the_object_that_a_store_does_not_give_is_named(trainer: Trainer) -> None:
    """A server that takes requests and answers none; only while the loader is what is waited for."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        options = {"key": "k", "secret": "s", "endpoint_url": url}
        dataset = Remote("s3://bucket/data", ["a/1.bin", "a/2.bin"], make=len, options=options, patience=0)
        thread = trainer.loads(dataset, 0)
        try:
            assert wait_until(lambda: trainer.source.startswith("s3://bucket/data/a/"), 60)
            trainer.progress.phase(Phase.USER)
            assert trainer.source == ""
        finally:
            # Connections that were never accepted are refused with it.
            server.close()
            thread.join(60)
    assert not thread.is_alive()


def test_a_process_that_is_no_loaders_writes_nothing(trainer: Trainer) -> None:
    """A script may fork others; and of many loaders' processes the last have no place."""
    with source_waits.source("outer"):
        context = multiprocessing.get_context("fork")
        for place in (None, source_waits.PLACES):
            child = context.Process(target=_waits, args=(place,))
            child.start()
            child.join(60)
            assert child.exitcode == 0
        trainer.progress.loading()
        assert trainer.source == "outer"
        with source_waits.source("x" * 500):
            assert trainer.source == "x" * 120
        assert trainer.source == "outer"


def _waits(place: int | None) -> None:
    if place is not None:
        source_waits.take_place(place)
    source_waits._own.open.clear()
    with source_waits.source("another"):
        pass

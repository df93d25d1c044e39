"""What can save and load a sharded state, each used as its own documentation says.

All save the same bytes from the same processes. What one makes durable the others make durable too: if a
contender does not sync its files, its ranks do it within the time measured.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from chaos.bench.shards import COLUMNS, State
from checkpointing import Box, Piece, TensorSpec, commit, fence, open_checkpoint, open_store, resolve, save_rank
from checkpointing.format.encoding import hexdigest
from checkpointing.reading.packs import PackSource
from checkpointing.saving import hashing
from elastic3d.devices.cpu import CpuDevice
from elastic3d.snapshots.arena import Arena
from elastic3d.training import restoring
from elastic3d.training.restoring import STORE, Decision
from elastic3d.worker.processes.copying import Copier, prepare

OBJECT = 32 << 20


class Contender(Protocol):
    """Saves and loads the state it was made with."""

    def save(self, step: int) -> None:
        """Return when the save is durable on this rank; the caller puts a barrier behind it."""
        ...

    def load(self, step: int) -> None:
        """Fill the shards."""
        ...


class Ours:
    """elastic3d's checkpointing: a tile's digest is computed when it is saved and checked when it is loaded."""

    def __init__(self, state: State) -> None:
        self.state, self.job = state, state.job
        self.store = open_store(self.job.place)
        self.parent: Any = None
        self.written = 0
        if self.job.rank == 0 and not self.job.saved_by:
            fence(self.store, 1)

    def _boxes(self) -> list[tuple[TensorSpec, Box]]:
        box = Box(start=(self.state.first, 0), stop=(self.state.stop, COLUMNS))
        return [(TensorSpec(key=key, dtype="float32", shape=self.state.shape), box) for key in self.state.shards]

    def save(self, step: int) -> None:
        pieces = [Piece(spec=spec, box=box, data=self.state.bytes(spec.key)) for spec, box in self._boxes()]
        made: dict[str, Any] = {"step": step, "made_in": 1, "attempt": 1}
        saved = save_rank(
            self.store, **made, rank=self.job.rank, world=self.job.world, pieces=pieces, facts={}, parent=self.parent
        )
        self.written = saved.written
        dist.barrier()
        if self.job.rank == 0:
            commit(self.store, **made, committed_in=1, world=self.job.world)

    def load(self, step: int) -> None:
        # As trainers do it: rank 0 opens the checkpoint and broadcasts what it found.
        message: list[Any] = [None]
        if self.job.rank == 0:
            saved = open_checkpoint(self.store)
            decision = Decision(source=STORE, step=saved.step, generation=1, offers=tuple(saved.offers(STORE)))
            message = [restoring.dump(decision)]
        dist.broadcast_object_list(message, src=0)
        decision = restoring.load(message[0])
        assert decision.step == step
        source = PackSource(self.store, STORE)
        offers = restoring.offers(decision, {STORE: source}, self._boxes())
        resolve(self._boxes(), offers, {STORE: source}, lambda spec, box: self.state.bytes(spec.key))

    def remember(self) -> None:
        """Save the next step as the successor of this one."""
        self.parent = open_checkpoint(self.store)


@contextmanager
def blind(step: int) -> Iterator[None]:
    """Let saves skip the bytes: no digests and no statistics, only distinct names for distinct tiles."""
    seams: Any = hashing
    before = seams.digest, seams.statistics

    def named(spec: TensorSpec, box: Box, data: object) -> str:
        return hexdigest(f"{step} {spec.key} {box}".encode())

    seams.digest, seams.statistics = named, lambda dtype, data: None
    try:
        yield
    finally:
        seams.digest, seams.statistics = before


class Dcp:
    """torch.distributed.checkpoint, to a directory with synced files, or through fsspec."""

    def __init__(self, state: State) -> None:
        self.state, self.job = state, state.job
        self.tensors = state.dtensors()
        self.remote = "://" in self.job.place

    def _writer(self, step: int) -> Any:
        path = f"{self.job.place}/dcp-{step}"
        if self.remote:
            from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

            return FsspecWriter(path)
        return FileSystemWriter(path, sync_files=True)

    def save(self, step: int) -> None:
        save(dict(self.tensors), storage_writer=self._writer(step))

    def load(self, step: int) -> None:
        path = f"{self.job.place}/dcp-{step}"
        reader: Any
        if self.remote:
            from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

            reader = FsspecReader(path)
        else:
            reader = FileSystemReader(path)
        load(dict(self.tensors), storage_reader=reader)

    def begin(self, step: int) -> Callable[[], None]:
        """Save beside the training; return what waits for it. All of the copy is in the call."""
        future: Any = async_save(dict(self.tensors), storage_writer=self._writer(step))
        return lambda: _finish(future)


class TorchCheckpointing:
    """The package torch_checkpointing, which computes no digests and syncs no files: here each rank syncs its share.

    Each rank saves its own tensors. Its resharding exchanges metadata over CUDA, so it is not tried on a CPU.
    """

    def __init__(self, state: State, *, beside: bool = False) -> None:
        from torch_checkpointing import CheckpointManager
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        self.state, self.job = state, state.job
        self.tensors = state.shards
        config = CheckpointManager.Config.with_async_save() if beside else CheckpointManager.Config.with_sync_save()
        # Direct I/O fails where writes are not aligned, as torch.save's are not.
        config.storage_config = LocalFileSystemStorageConfig(use_direct_io=False)
        self.manager = CheckpointManager(config)

    def _folder(self, step: int) -> Path:
        return Path(self.job.place, f"tc-{step}")

    def save(self, step: int) -> None:
        self.manager.save(str(self._folder(step)), {"state": dict(self.tensors)})
        dist.barrier()
        files = sorted(path for path in self._folder(step).rglob("*") if path.is_file())
        for path in files[self.job.rank :: self.job.world]:
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)

    def load(self, step: int) -> None:
        self.manager.load(str(self._folder(step)), into={"state": dict(self.tensors)})

    def begin(self, step: int) -> Callable[[], None]:
        """Save beside the training; return what waits for it."""
        future = self.manager.save(str(self._folder(step)), {"state": dict(self.tensors)})
        assert future is not None
        return lambda: _finish(future)

    def hold(self) -> None:
        """What the next optimizer step waits for."""
        with self.manager.lock():
            pass

    def close(self) -> None:
        """End the process that writes."""
        self.manager.close()


class Raw:
    """The limit: each rank's bytes in one synced file, and read back into place."""

    def __init__(self, state: State) -> None:
        self.state, self.job = state, state.job

    def _path(self, step: int) -> Path:
        return Path(self.job.place, f"raw-{step}-{self.job.rank}")

    def save(self, step: int) -> None:
        with open(self._path(step), "wb", buffering=0) as file:
            for key in self.state.shards:
                file.write(self.state.bytes(key))
            os.fsync(file.fileno())

    def load(self, step: int) -> None:
        with open(self._path(step), "rb", buffering=0) as file:
            for key in self.state.shards:
                file.readinto(self.state.bytes(key))


class RawRemote:
    """The limit of an S3 server: each rank's bytes in objects of 32 MiB, four at a time, with the bare client."""

    def __init__(self, state: State) -> None:
        import obstore
        from obstore.store import S3Store

        self.state, self.client = state, obstore
        bucket, _, prefix = state.job.place.removeprefix("s3://").partition("/")
        self.store = S3Store(
            bucket,
            prefix=f"{prefix}/{state.job.rank}",
            endpoint=os.environ["AWS_ENDPOINT_URL"],
            client_options={"allow_http": True},
        )
        self.pool = ThreadPoolExecutor(4)

        self.objects: list[list[memoryview]] = [[]]
        for key in state.shards:
            if sum(map(len, self.objects[-1])) >= OBJECT:
                self.objects.append([])
            self.objects[-1].append(state.bytes(key))

    def save(self, step: int) -> None:
        list(
            self.pool.map(lambda n: self.client.put(self.store, f"{step}/{n}", b"".join(self.objects[n])), self._all())
        )

    def load(self, step: int) -> None:
        def get(number: int) -> None:
            data, start = memoryview(self.client.get(self.store, f"{step}/{number}").bytes()), 0
            for part in self.objects[number]:
                part[:] = data[start : start + len(part)]
                start += len(part)

        list(self.pool.map(get, self._all()))

    def _all(self) -> range:
        return range(len(self.objects))


class Snapshots:
    """elastic3d's snapshot: the copy that a trainer makes for its keeper, who saves it."""

    def __init__(self, state: State) -> None:
        self.copier = Copier([Arena.create() for _ in range(3)], CpuDevice())
        self.state, self.number = state, 0
        box = Box(start=(state.first, 0), stop=(state.stop, COLUMNS))
        self.tiles = [
            (TensorSpec(key=key, dtype="float32", shape=state.shape), box, shard) for key, shard in state.shards.items()
        ]

    def begin(self, step: int) -> Callable[[], None]:
        """Copy beside the training; nothing of the save is left to wait for in this process."""
        copy = prepare(self.tiles, None, CpuDevice(), acquire=lambda: step % 3, complete=lambda buffer, digests: None)
        self.copier.start(copy)
        return lambda: None

    def hold(self) -> None:
        """What the next optimizer step waits for."""
        self.copier.finish()


def _finish(future: Any) -> None:
    """Wait for a save, and ignore what it returns."""
    future.result()


def contender(name: str, state: State) -> Contender:
    """Return what saves and loads under this name."""
    kinds: dict[str, Callable[[State], Contender]] = {
        "elastic3d": Ours,
        "dcp": Dcp,
        "torch_checkpointing": TorchCheckpointing,
        "raw": RawRemote if "://" in state.job.place else Raw,
    }
    return kinds[name](state)


def beside(name: str, state: State) -> Any:
    """Return what saves beside the training under this name."""
    kinds: dict[str, Callable[[State], Any]] = {
        "elastic3d": Snapshots,
        "dcp": Dcp,
        "torch_checkpointing": lambda state: TorchCheckpointing(state, beside=True),
    }
    return kinds[name](state)

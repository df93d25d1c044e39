"""What can save and load a sharded state, each as its own documentation uses it; one rank of it is one process.

The state is that of Adam in fp32: parameters, `exp_avg` and `exp_avg_sq`, each tensor cut along its first dim. All
contenders save the same bytes from the same processes. What one makes durable the others make durable too: where a
contender does not sync its files, its ranks do it within the time measured.

Run as `python -m chaos.bench.savers CONTENDER JOB`, JOB being one `Job` as JSON; rank 0 prints `Figures` as JSON.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from checkpointing import Box, Piece, TensorSpec, commit, fence, open_checkpoint, open_store, resolve, save_rank
from elastic3d.snapshots.arena import Arena
from elastic3d.worker.copying import Copier, prepare

COLUMNS = 1024
OBJECT = 32 << 20
BLOCK = 64
"""Rows that are drawn together, counted from the tensor's first, so that they are the same in every world."""
STATES = ("param", "exp_avg", "exp_avg_sq")
FROZEN = 10
"""One tensor in so many changes in the task `frozen`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What one rank shall do. place: a directory or URL of all ranks; step_seconds: of the step beside a copy."""

    rank: int
    world: int
    meeting: str
    place: str
    task: str
    repeats: int
    tensors: int
    rows: int
    saved_by: int = 0
    step_seconds: float = 0.5


@dataclass(slots=True, kw_only=True)
class Figures:
    """What came of it: seconds of each repeat, the slowest rank's; bytes of one rank's shard and of all.

    call, hold: of an asynchronous save, until it returns and what the next optimizer step waits for. memory: the peak
    beyond what was there before, as a multiple of the shard. written: bytes that the last save added.
    """

    shard: int
    total: int
    save: list[float] = field(default_factory=list)
    load: list[float] = field(default_factory=list)
    call: list[float] = field(default_factory=list)
    hold: list[float] = field(default_factory=list)
    memory_save: float = 0.0
    memory_load: float = 0.0
    written: int = 0
    changed: int = 0


class State:
    """This rank's shards, by key, and what they hold."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.shape = (job.rows, COLUMNS)
        per = -(-job.rows // job.world)
        self.first, self.stop = min(job.rank * per, job.rows), min((job.rank + 1) * per, job.rows)
        self.shards: dict[str, torch.Tensor] = {}
        for number in range(job.tensors):
            for kind in STATES:
                self.shards[f"{kind}.block{number}.weight"] = torch.empty(self.stop - self.first, COLUMNS)
        self.fill()

    @property
    def nbytes(self) -> int:
        """Bytes of all shards of this rank."""
        return sum(shard.nbytes for shard in self.shards.values())

    def fill(self) -> None:
        """Put numbers into the shards that depend on key and row alone, whatever the world."""
        for number, shard in enumerate(self.shards.values()):
            for row in range(self.first - self.first % BLOCK, self.stop, BLOCK):
                generator = torch.Generator().manual_seed(number * 1_000_003 + row)
                block = torch.randn(BLOCK, COLUMNS, generator=generator)
                low, high = max(row, self.first), min(row + BLOCK, self.stop)
                shard[low - self.first : high - self.first] = block[low - row : high - row]

    def bytes(self, key: str) -> memoryview:
        """Return a shard's bytes, for reading and writing."""
        return memoryview(self.shards[key].numpy().data).cast("B")

    def touch(self, every: int) -> int:
        """Change one tensor in `every`; return the bytes of it on this rank."""
        changed = 0
        for number, shard in enumerate(self.shards.values()):
            if number % every == 0:
                shard.mul_(1.001)
                changed += shard.nbytes
        return changed

    def clear(self) -> None:
        """Forget the numbers."""
        for shard in self.shards.values():
            shard.zero_()

    def check(self) -> None:
        """Raise AssertionError unless the shards hold what `fill` puts there."""
        found = {key: shard.clone() for key, shard in self.shards.items()}
        self.fill()
        for key, shard in self.shards.items():
            assert torch.equal(found[key], shard), f"{key} came back changed"

    def dtensors(self) -> dict[str, DTensor]:
        """Return the shards as DTensors over the world."""
        mesh = init_device_mesh("cpu", (self.job.world,))
        return {
            key: DTensor.from_local(shard, mesh, [Shard(0)], shape=torch.Size(self.shape), stride=(COLUMNS, 1))
            for key, shard in self.shards.items()
        }


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
        checkpoint = open_checkpoint(self.store)
        assert checkpoint.step == step
        source = checkpoint.source()
        resolve(self._boxes(), checkpoint.offers(), {source.name: source}, lambda spec, box: self.state.bytes(spec.key))

    def remember(self) -> None:
        """Save the next step as the successor of this one."""
        self.parent = open_checkpoint(self.store)


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
        future = async_save(dict(self.tensors), storage_writer=self._writer(step))
        return lambda: (future.result(), None)[1]  # type: ignore[union-attr]


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
        return lambda: (future.result(), None)[1]

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
        self.copier = Copier([Arena.create() for _ in range(3)])
        self.state, self.number = state, 0
        box = Box(start=(state.first, 0), stop=(state.stop, COLUMNS))
        self.tiles = [
            (TensorSpec(key=key, dtype="float32", shape=state.shape), box, shard) for key, shard in state.shards.items()
        ]

    def begin(self, step: int) -> Callable[[], None]:
        """Copy beside the training; nothing of the save is left to wait for in this process."""
        self.copier.start(prepare(self.tiles, None, acquire=lambda: step % 3, complete=lambda buffer: None))
        return lambda: None

    def hold(self) -> None:
        """What the next optimizer step waits for."""
        self.copier.finish()


def main(name: str, job: Job) -> Figures:
    """Do the job as one rank, and return what all ranks saw."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{job.meeting}", rank=job.rank, world_size=job.world, timeout=timedelta(minutes=10)
    )
    state = State(job)
    total = job.tensors * len(STATES) * job.rows * COLUMNS * 4
    figures = Figures(shard=state.nbytes, total=total)
    match job.task:
        case "save":
            _save(_contender(name, state), state, figures)
        case "load":
            contender = _contender(name, state)
            for _ in range(job.repeats):
                state.clear()
                figures.load.append(_timed(lambda: contender.load(job.repeats)))
            state.check()
        case "beside":
            beside = _beside_contender(name, state)
            _beside(beside, job, figures)
            if hasattr(beside, "close"):
                beside.close()
        case "frozen":
            figures = _frozen(_contender(name, state), state, figures)
        case _:
            raise ValueError(job.task)
    dist.barrier()
    dist.destroy_process_group()
    return figures


def _contender(name: str, state: State) -> Contender:
    kinds: dict[str, Callable[[State], Contender]] = {
        "elastic3d": Ours,
        "dcp": Dcp,
        "torch_checkpointing": TorchCheckpointing,
        "raw": RawRemote if "://" in state.job.place else Raw,
    }
    return kinds[name](state)


def _beside_contender(name: str, state: State) -> Any:
    return {  # type: ignore[no-untyped-call]
        "elastic3d": Snapshots,
        "dcp": Dcp,
        "torch_checkpointing": lambda state: TorchCheckpointing(state, beside=True),
    }[name](state)


def _save(contender: Contender, state: State, figures: Figures) -> None:
    repeats = state.job.repeats
    memory = [0.0, 0.0]
    for step in range(1, repeats + 1):
        memory[0] = max(memory[0], _peak(lambda step=step: figures.save.append(_timed(lambda: contender.save(step)))))  # type: ignore[misc]
    for _ in range(repeats):
        state.clear()
        memory[1] = max(memory[1], _peak(lambda: figures.load.append(_timed(lambda: contender.load(repeats)))))
    state.check()
    figures.memory_save, figures.memory_load = (_largest(value / state.nbytes) for value in memory)


def _beside(contender: Any, job: Job, figures: Figures) -> None:
    a = torch.randn(256, 256)
    for step in range(1, job.repeats + 1):
        dist.barrier()
        begun = time.perf_counter()
        wait = contender.begin(step)
        call = time.perf_counter() - begun
        # The next forward and backward.
        while time.perf_counter() - begun - call < job.step_seconds:
            a = torch.tanh(a @ a)
        begun = time.perf_counter()
        if hasattr(contender, "hold"):
            contender.hold()
        hold = time.perf_counter() - begun
        wait()
        figures.call.append(_largest(call))
        figures.hold.append(_largest(hold))


def _frozen(contender: Contender, state: State, figures: Figures) -> Figures:
    contender.save(1)
    dist.barrier()
    before = _stored(state.job)
    if isinstance(contender, Ours):
        contender.remember()
    changed = state.touch(FROZEN)
    contender.save(2)
    dist.barrier()
    return Figures(
        shard=figures.shard, total=figures.total, written=_stored(state.job) - before, changed=int(_sum(changed))
    )


def _stored(job: Job) -> int:
    return sum(path.stat().st_size for path in Path(job.place).rglob("*") if path.is_file())


def _timed(do: Callable[[], None]) -> float:
    """Return the seconds from a barrier until all ranks have done it."""
    dist.barrier()
    begun = time.perf_counter()
    do()
    dist.barrier()
    return _largest(time.perf_counter() - begun)


def _peak(do: Callable[[], None]) -> float:
    """Return by how many bytes the resident memory of this process was larger, at its peak, than before."""
    Path("/proc/self/clear_refs").write_text("5")
    before = _resident("VmRSS")
    do()
    return _resident("VmHWM") - before


def _resident(field: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return float(line.split()[1]) * 1024
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * 1024


def _largest(value: float) -> float:
    tensor = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return float(tensor)


def _sum(value: float) -> float:
    tensor = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(tensor)
    return float(tensor)


if __name__ == "__main__":
    said = main(sys.argv[1], Job(**json.loads(sys.argv[2])))
    if json.loads(sys.argv[2])["rank"] == 0:
        print(json.dumps(asdict(said)))

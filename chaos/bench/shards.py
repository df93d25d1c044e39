"""The state that contenders save: that of Adam in fp32, each tensor cut along its first dim."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

COLUMNS = 1024
BLOCK = 64
"""Rows that are drawn together, counted from the tensor's first, so that they are the same in every world."""
FACTOR = 1.001
STATES = ("param", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What one rank shall do. place: a directory or URL of all ranks.

    step_seconds: of the step beside a copy, longer than the copy takes. changes: how often what is saved was changed.
    """

    rank: int
    world: int
    meeting: str
    place: str
    task: str
    repeats: int
    tensors: int
    rows: int
    saved_by: int = 0
    step_seconds: float = 1.5
    changes: int = 0


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
        self.changes = job.changes
        self.fill()

    @property
    def nbytes(self) -> int:
        """Bytes of all shards of this rank."""
        return sum(shard.nbytes for shard in self.shards.values())

    def fill(self) -> None:
        """Put numbers into the shards that depend on key, row and number of changes alone, whatever the world."""
        for number, shard in enumerate(self.shards.values()):
            for row in range(self.first - self.first % BLOCK, self.stop, BLOCK):
                generator = torch.Generator().manual_seed(number * 1_000_003 + row)
                block = torch.randn(BLOCK, COLUMNS, generator=generator)
                low, high = max(row, self.first), min(row + BLOCK, self.stop)
                shard[low - self.first : high - self.first] = block[low - row : high - row]
            for _ in range(self.changes):
                shard.mul_(FACTOR)

    def change(self) -> None:
        """Change every number, so that none of the shards was saved before."""
        self.changes += 1
        for shard in self.shards.values():
            shard.mul_(FACTOR)

    def bytes(self, key: str) -> memoryview:
        """Return a shard's bytes, for reading and writing."""
        return memoryview(self.shards[key].numpy().data).cast("B")

    def touch(self, every: int) -> int:
        """Change one tensor in `every`; return the bytes of it on this rank."""
        changed = 0
        for number, shard in enumerate(self.shards.values()):
            if number % every == 0:
                shard.mul_(FACTOR)
                changed += shard.nbytes
        return changed

    def clear(self) -> None:
        """Forget the numbers."""
        for shard in self.shards.values():
            shard.zero_()

    def check(self) -> None:
        """Raise AssertionError unless the shards hold what `fill` puts there."""
        kept = {key: shard.clone() for key, shard in self.shards.items()}
        self.fill()
        for key, shard in self.shards.items():
            assert torch.equal(kept[key], shard), f"{key} came back changed"

    def dtensors(self) -> dict[str, DTensor]:
        """Return the shards as DTensors over the world."""
        mesh = init_device_mesh("cpu", (self.job.world,))
        return {
            key: DTensor.from_local(shard, mesh, [Shard(0)], shape=torch.Size(self.shape), stride=(COLUMNS, 1))
            for key, shard in self.shards.items()
        }

"""The mesh of one generation: its axes, this rank's place on them, and their process groups.

Ranks are laid out as `elastic3d.planner.placement` says: pp outermost, then dp, cp and tp. With replicas (HSDP) dp is
two axes: dp index = replica * shards + shard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore, set_debug_level_from_env
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from elastic3d.devices import ComputeDevice
from elastic3d.health.phases import Axis
from elastic3d.health.record import fingerprint
from elastic3d.parallel.dtypes import dtype_mark
from elastic3d.planner import place_of
from elastic3d.port import UNRECORDED, Assignment, Progress
from elastic3d.values import Layout

GROUP_TIMEOUT = timedelta(minutes=10)

_SUM, _HIGHEST, _GATHER, _BROADCAST, _DEVICE, _SHIFT, _FROM = range(1, 8)
"""Kinds of operations on the world, for their fingerprints; 0 is that of making it."""


class Mesh:
    """Process groups over the axes, None where an axis has one rank.

    pp: group of one pipeline. dp: all data-parallel ranks at one place on the other axes. shard: the mesh for
    fully_shard: `dp` itself, with replicas the two axes (replica, shard), with cp the ranks of dp and cp in one axis.
    tp: the ranks that compute one layer together. cp: those that share the chunks of one sequence. All are cut from one
    mesh, as FSDP over tensor-parallel parameters needs.

    groups: all of them by their axis. On a device those of pp, and of replicas where sums go from one to the next, get
    their communicators one by one, where they are first used: of a group that is connected as a whole, torch queues
    what goes from one rank to another behind everything else (https://github.com/pytorch/pytorch/issues/154132). The
    others are connected at once, in one order on every rank, so that no step waits for it.

    What ranks tell each other besides (votes, numbers, bytes) is on the CPU: it waits for no device, and none for it.
    """

    def __init__(
        self,
        layout: Layout,
        rank: int,
        device: ComputeDevice,
        *,
        progress: Progress = UNRECORDED,
        passes: bool = False,
    ) -> None:
        self.layout, self.rank, self.computes_on, self.progress = layout, rank, device, progress
        self.device = device.torch_device
        self.place = place_of(rank, layout)
        self.pp: dist.ProcessGroup | None = None
        self.dp: DeviceMesh | None = None
        self.shard: DeviceMesh | None = None
        self.tp: DeviceMesh | None = None
        self.cp: DeviceMesh | None = None
        self.groups: dict[str, dist.ProcessGroup] = {}
        self._axes: DeviceMesh | None = None
        if layout.world == 1:
            return
        axes = {"pp": layout.pp, "dp": layout.dp, "tp": layout.tp}
        if layout.replicas > 1:
            axes = {"pp": layout.pp, "replica": layout.replicas, "shard": layout.shards, "tp": layout.tp}
        if layout.cp > 1:
            assert layout.replicas == 1
            axes = {"pp": layout.pp, "dp": layout.dp, "cp": layout.cp, "tp": layout.tp}
        self._axes = mesh = init_device_mesh(self.device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))
        if layout.pp > 1:
            self.pp = mesh["pp"].get_group()
        if layout.replicas > 1:
            self.shard = mesh["replica", "shard"]
            self.dp = self.shard._flatten("dp")
        elif layout.dp > 1:
            self.dp = self.shard = mesh["dp"]
        if layout.cp > 1:
            self.cp = mesh["cp"]
            self.shard = mesh["dp", "cp"]._flatten("dp_cp") if self.dp is not None else self.cp
        if layout.tp > 1:
            self.tp = mesh["tp"]
        self.groups = self._by_axis()
        for axis, group in self.groups.items():
            if axis != "pp" and not (axis == "replica" and passes):
                device.connect(group)

    def _by_axis(self) -> dict[str, dist.ProcessGroup]:
        groups: dict[str, dist.ProcessGroup] = {}
        if self.tp is not None:
            groups["tp"] = self.tp.get_group()
        if self.cp is not None and self.shard is not None:
            groups["cp"], groups["shard"] = self.cp.get_group(), self.shard.get_group()
        elif self.shard is not None and self.shard is not self.dp:
            groups["replica"], groups["shard"] = self.shard.get_group("replica"), self.shard.get_group("shard")
        if self.dp is not None:
            groups["dp"] = self.dp.get_group()
        if self.pp is not None:
            groups["pp"] = self.pp
        return {axis: group for axis, group in groups.items() if group.size() > 1}

    def alone(self) -> DeviceMesh:
        """Return the axis dp of a single rank, for sharding that only casts; makes a world if there is none."""
        assert self.layout.dp == self.layout.cp == 1
        if self._axes is None:
            if not dist.is_initialized():
                dist.init_process_group(self.computes_on.backend, store=HashStore(), rank=0, world_size=1)
            self._axes = init_device_mesh(self.device.type, (1,), mesh_dim_names=("dp",))
        return self._axes["dp"]

    def begin_sum(self, votes: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Begin the sum of a CPU vector over the world; return what waits for it and returns it."""
        if self.layout.world == 1:
            return lambda: votes
        mark = fingerprint(_SUM, votes.numel(), dtype_mark(votes.dtype))
        number = self.progress.post(Axis.WORLD, mark)
        work = dist.all_reduce(votes, async_op=True)

        def wait() -> torch.Tensor:
            self.progress.wait(Axis.WORLD, number, mark)
            work.wait()
            self.progress.leave(Axis.WORLD, number)
            return votes

        return wait

    @contextmanager
    def device_awaited(self) -> Iterator[None]:
        """Note that this rank waits for its device, on which operations of the step wait for other ranks' devices.

        On the CPU every operation is waited for where it is made, and noted there.
        """
        if self.layout.world == 1 or self.device.type == "cpu":
            yield
            return
        number = self.progress.enter(Axis.WORLD, fingerprint(_DEVICE))
        yield
        self.progress.leave(Axis.WORLD, number)

    def highest(self, number: int) -> int:
        """Return the highest of all ranks' numbers, on every rank."""
        if self.layout.world == 1:
            return number
        numbers = torch.tensor([number], dtype=torch.int64)
        entered = self.progress.enter(Axis.WORLD, fingerprint(_HIGHEST))
        dist.all_reduce(numbers, op=dist.ReduceOp.MAX)
        self.progress.leave(Axis.WORLD, entered)
        return int(numbers)

    def gather(self, data: bytes) -> list[bytes]:
        """Return every rank's bytes, in order of ranks, on every rank. Unlike torch's version, it unpickles nothing."""
        if self.layout.world == 1:
            return [data]
        entered = self.progress.enter(Axis.WORLD, fingerprint(_GATHER))
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.layout.world)]
        dist.all_gather(sizes, torch.tensor([len(data)], dtype=torch.int64))
        longest = max(int(size) for size in sizes)
        mine = torch.zeros(longest, dtype=torch.uint8)
        if data:
            mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        parts = [torch.empty_like(mine) for _ in sizes]
        dist.all_gather(parts, mine)
        self.progress.leave(Axis.WORLD, entered)
        return [part[: int(size)].numpy().tobytes() for part, size in zip(parts, sizes, strict=True)]

    def shifted(self, out: torch.Tensor, shift: int) -> torch.Tensor:
        """Send bytes on the CPU to the rank `shift` further on; return as many from the rank `shift` before this one.

        A collective: every rank calls it with as many bytes and the same shift, from 1 to world - 1.
        """
        world, into = self.layout.world, torch.empty_like(out)
        entered = self.progress.enter(Axis.WORLD, fingerprint(_SHIFT, out.numel(), shift))
        sent = dist.isend(out, (self.rank + shift) % world)
        received = dist.irecv(into, (self.rank - shift) % world)
        for work in (received, sent):
            if work is not None:
                work.wait()
        self.progress.leave(Axis.WORLD, entered)
        return into

    def from_rank(self, mine: torch.Tensor, rank: int) -> torch.Tensor:
        """Return a rank's bytes on the CPU, of which each rank has as many; a collective."""
        into = mine.clone()
        entered = self.progress.enter(Axis.WORLD, fingerprint(_FROM, into.numel()))
        dist.broadcast(into, src=rank)
        self.progress.leave(Axis.WORLD, entered)
        return into

    def broadcast(self, data: bytes | None) -> bytes:
        """Return rank 0's bytes on every rank; the others give None."""
        if self.layout.world == 1:
            assert data is not None
            return data
        entered = self.progress.enter(Axis.WORLD, fingerprint(_BROADCAST))
        size = torch.tensor([len(data) if data is not None else 0], dtype=torch.int64)
        dist.broadcast(size, src=0)
        content = torch.empty(int(size), dtype=torch.uint8)
        if data is not None:
            content.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        dist.broadcast(content, src=0)
        self.progress.leave(Axis.WORLD, entered)
        return content.numpy().tobytes()


def join_world(assignment: Assignment, device: ComputeDevice) -> Store:
    """Make the default process group in the generation's part of the store, and return that part."""
    # A forked process still has the log level that its parent read.
    set_debug_level_from_env()
    server = TCPStore(
        assignment.store_host, assignment.store_port, is_master=False, wait_for_workers=False, timeout=GROUP_TIMEOUT
    )
    store = PrefixStore(assignment.store_prefix, server)
    dist.init_process_group(
        device.backend,
        store=store,
        rank=assignment.rank,
        world_size=assignment.world,
        timeout=GROUP_TIMEOUT,
    )
    return store

"""The mesh of one generation: its axes, this rank's place on them, and their process groups.

Ranks are laid out as `elastic3d.planner.places` says.
"""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore, set_debug_level_from_env
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from elastic3d.planner import place_of
from elastic3d.port import Assignment
from elastic3d.values import Layout

GROUP_TIMEOUT = timedelta(minutes=10)


class Mesh:
    """Process groups over the axes. `pp` and `dp` are None where the axis has one rank."""

    def __init__(self, layout: Layout, rank: int, device: torch.device) -> None:
        self.layout, self.rank, self.device = layout, rank, device
        self.place = place_of(rank, layout)
        self.pp: dist.ProcessGroup | None = None
        self.dp: DeviceMesh | None = None
        if layout.world > 1:
            mesh = init_device_mesh(device.type, (layout.pp, layout.dp), mesh_dim_names=("pp", "dp"))
            self.pp = mesh["pp"].get_group() if layout.pp > 1 else None
            self.dp = mesh["dp"] if layout.dp > 1 else None

    def sum(self, votes: torch.Tensor) -> torch.Tensor:
        """Return the sum of a CPU vector over the world."""
        if self.layout.world == 1:
            return votes
        votes = votes.to(self.device)
        dist.all_reduce(votes)
        return votes.cpu()

    def broadcast(self, data: bytes | None) -> bytes:
        """Return rank 0's bytes on every rank; the others give None."""
        if self.layout.world == 1:
            assert data is not None
            return data
        size = torch.tensor([len(data) if data is not None else 0], dtype=torch.int64, device=self.device)
        dist.broadcast(size, src=0)
        content = torch.empty(int(size), dtype=torch.uint8, device=self.device)
        if data is not None:
            content.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        dist.broadcast(content, src=0)
        return content.cpu().numpy().tobytes()


def join_world(assignment: Assignment, device: torch.device) -> None:
    """Make the default process group in the generation's own part of its store."""
    if assignment.interface:
        os.environ["GLOO_SOCKET_IFNAME"] = assignment.interface
    # A forked process still has the level that its parent read.
    set_debug_level_from_env()
    store = TCPStore(
        assignment.store_host, assignment.store_port, is_master=False, wait_for_workers=False, timeout=GROUP_TIMEOUT
    )
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=PrefixStore(assignment.store_prefix, store),
        rank=assignment.rank,
        world_size=assignment.world,
        timeout=GROUP_TIMEOUT,
    )

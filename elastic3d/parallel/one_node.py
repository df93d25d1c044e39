"""The axes whose ranks are on one node, so that no death of a node changes their size: tp and cp."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from elastic3d.errors import LayoutError
from elastic3d.parallel.randomness import keyed_seed

_TOGETHER = {"tp": "compute one layer", "cp": "share one sequence"}


def check_node(axis: str, mesh: DeviceMesh, node: str) -> None:
    """Refuse ranks of one place on "tp" or "cp" that are on different nodes: LayoutError. A collective of them."""
    own = torch.tensor([keyed_seed(node)], dtype=torch.int64, device=mesh.device_type)
    everyones = own.new_empty(mesh.size())
    dist.all_gather_into_tensor(everyones, own, group=mesh.get_group())
    if bool((everyones != own).any()):
        raise LayoutError(
            f"{axis}={mesh.size()} puts ranks that {_TOGETHER[axis]} on different nodes; let {axis} divide the number "
            "of slots of a node"
        )

"""Which reduction a run has, from what the user asked for and the layout."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.distributed.fsdp import FSDPModule

from elastic3d.parallel.mesh import Mesh
from elastic3d.parallel.reduction.fast import Fast
from elastic3d.parallel.reduction.ordered import Ordered
from elastic3d.parallel.reduction.protocol import Reduction


def make(how: str, model: nn.Module, units: Sequence[FSDPModule], mesh: Mesh) -> Reduction:
    """Return the reduction of one stage of this rank. units: its FSDP units, the root last."""
    zero = mesh.layout.zero
    if how == "fast":
        return Fast(model, units, zero=zero)
    return Ordered(
        model,
        units,
        group=mesh.dp.get_group() if mesh.dp else None,
        replicas=mesh.layout.replicas,
        zero=zero,
    )

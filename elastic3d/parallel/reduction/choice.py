"""Which reduction a run has: the user's choices, and what they mean under a layout."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from elastic3d.errors import LayoutError, UsageError
from elastic3d.parallel.mesh import Mesh
from elastic3d.parallel.reduction.compressed import POWERSGD, WIRES, Compressed
from elastic3d.parallel.reduction.fast import Fast
from elastic3d.parallel.reduction.ordered import Ordered
from elastic3d.parallel.reduction.protocol import Reduction
from elastic3d.parallel.reduction.single_replica import SingleReplica
from elastic3d.planner.passing import passed_on

COMPRESSIONS = (*WIRES, POWERSGD)


def check(reduction: str, compress: str | None, leaf: int) -> None:
    """Refuse a choice that no layout could carry out."""
    if reduction not in ("ordered", "fast"):
        raise UsageError(f'run.shard: reduction must be "ordered" or "fast"; it is {reduction!r}')
    if isinstance(leaf, bool) or not isinstance(leaf, int) or leaf < 1:
        raise UsageError(f"run.shard: leaf must be a number of micro-batches, 1 or more; it is {leaf!r}")
    if leaf > 1 and reduction != "ordered":
        raise UsageError(
            f'run.shard: leaf={leaf} is a part of the order of sums, which reduction="{reduction}" leaves to the '
            'backend; choose reduction="ordered" with it, or leave leaf out'
        )
    if compress is None:
        return
    if compress not in COMPRESSIONS:
        names = ", ".join(f'"{name}"' for name in COMPRESSIONS)
        raise UsageError(f"run.shard: compress must be one of {names}, or None; it is {compress!r}")
    if reduction == "ordered":
        raise UsageError(
            f'run.shard: compress="{compress}" rounds gradients, which reduction="ordered" does not; choose '
            'reduction="fast" with it, or leave compress out'
        )


def make(
    reduction: str, compress: str | None, leaf: int, model: nn.Module, units: Sequence[FSDPModule], mesh: Mesh
) -> Reduction:
    """Return the reduction of one stage of this rank. units: its FSDP units, the root last; none for one replica.

    LayoutError for a compression that has nothing to compress under this layout.
    """
    layout, add = mesh.layout, mesh.computes_on.add_rows
    if not units:
        return SingleReplica(model, leaf=leaf)
    if reduction == "ordered":
        passes = passed_on(layout)
        return Ordered(
            model,
            units,
            group=mesh.dp.get_group() if mesh.dp else None,
            add=add,
            replicas=layout.replicas,
            zero=layout.zero,
            splits=layout.schedule is not None and layout.schedule.splits_backward,
            leaf=leaf,
            shard=_group(mesh, "shard", layout.shards) if passes else None,
            replica=_group(mesh, "replica", layout.replicas) if passes else None,
            progress=mesh.progress,
        )
    if compress is None or mesh.shard is None:
        return Fast(model, units, zero=layout.zero)
    if compress == POWERSGD and layout.replicas == 1:
        raise LayoutError(
            f'compress="{POWERSGD}" compresses what replicas exchange, and {layout} has one replica: use '
            f'Layout(replicas={layout.dp}) or another divisor of dp={layout.dp}, or compress="bf16"'
        )
    return Compressed(
        model,
        units,
        add=add,
        compress=compress,
        shard=_group(mesh, "shard" if layout.replicas > 1 else "dp", layout.shards),
        replica=_group(mesh, "replica", layout.replicas),
        zero=layout.zero,
        progress=mesh.progress,
    )


def _group(mesh: Mesh, axis: str, ranks: int) -> dist.ProcessGroup | None:
    assert mesh.shard is not None
    return mesh.shard.get_group(axis) if ranks > 1 else None

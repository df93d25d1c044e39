"""One digest of the whole state, the same for any layout that holds the same bits."""

from __future__ import annotations

import json
from collections.abc import Iterable

import torch
import torch.distributed as dist
from blake3 import blake3
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from checkpointing.format.tiles import digest
from checkpointing.interchange.tensors import buffer_of
from elastic3d.parallel.mesh import Mesh
from elastic3d.parallel.state import TensorInMemory, held_by_model, held_by_optimizer
from elastic3d.planner.shares import run_of


def state_digest(
    mesh: Mesh, model: nn.Module, optimizer: torch.optim.Optimizer | None, extra: Iterable[TensorInMemory] = ()
) -> str:
    """Return the digest of all parameters, persistent buffers, optimizer tensors and extra ones, on every rank.

    A collective: every rank calls it at the same step. Shards are gathered one tensor at a time. Tensors that several
    ranks hold whole, such as scalars, are taken from the lowest ranks on dp and tp.
    """
    mine: dict[str, str] = {}
    for held in [*held_by_model(model), *(held_by_optimizer(model, optimizer) if optimizer else ()), *extra]:
        tensor = held.tensor.detach()
        whole = gathered(tensor) if isinstance(tensor, DTensor) else tensor
        # Whole tensors, such as experts, may differ between replicas.
        if mesh.place.tp == 0 and (mesh.place.dp == 0 or not isinstance(tensor, DTensor)):
            mine[held.spec.key] = digest(held.spec, held.spec.box, buffer_of(whole.cpu().contiguous()))
    return combine(_everyones(mesh, mine))


def gathered(tensor: DTensor) -> torch.Tensor:
    """Return a whole tensor on every rank of its mesh: the axes' cuts are undone in reverse order (see `box_of`).

    torch's own `full_tensor` gives the same, but warns wherever two axes cut one dim.
    """
    mesh, part = tensor.device_mesh, tensor._local_tensor
    lengths, shape = {}, list(tensor.shape)
    for axis in reversed(range(mesh.ndim)):
        placement = tensor.placements[axis]
        if isinstance(placement, Shard | _StridedShard):
            lengths[axis] = shape[placement.dim]
            start, stop = run_of(lengths[axis], mesh.size(axis), mesh.get_local_rank(axis))
            shape[placement.dim] = stop - start
    for axis in sorted(lengths):
        placement = tensor.placements[axis]
        assert isinstance(placement, Shard | _StridedShard)
        dim, length, ranks = placement.dim, lengths[axis], mesh.size(axis)
        run = -(-length // ranks)
        padded = part.new_zeros([run if d == dim else size for d, size in enumerate(part.shape)])
        padded.narrow(dim, 0, part.shape[dim]).copy_(part)
        parts = [torch.empty_like(padded) for _ in range(ranks)]
        # As bytes: they are moved, not computed with, and gloo does not know every dtype.
        into = [part.view(torch.uint8) for part in parts]
        dist.all_gather(into, padded.view(torch.uint8), group=mesh.get_group(axis))
        part = torch.cat(parts, dim).narrow(dim, 0, length)
    return part


def combine(digests: dict[str, str]) -> str:
    """Return the digest of named digests, whatever their order."""
    lines = "".join(f"{key} {value}\n" for key, value in sorted(digests.items()))
    return blake3(lines.encode()).hexdigest()


def _everyones(mesh: Mesh, mine: dict[str, str]) -> dict[str, str]:
    if mesh.layout.world == 1:
        return mine
    parts = [json.loads(part) for part in mesh.gather(json.dumps(mine).encode())]
    return {str(key): str(value) for part in reversed(parts) for key, value in part.items()}

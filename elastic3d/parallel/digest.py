"""One digest of the whole state, the same for any layout that holds the same bits."""

from __future__ import annotations

import torch
import torch.distributed as dist
from blake3 import blake3
from torch import nn
from torch.distributed.tensor import DTensor

from checkpointing.format.tiles import digest
from elastic3d.parallel.mesh import Mesh
from elastic3d.parallel.state import buffer_of, held_by_model, held_by_optimizer


def state_digest(mesh: Mesh, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> str:
    """Return the digest of all parameters, persistent buffers and optimizer tensors, on every rank.

    A collective: every rank calls it at the same step. Shards are gathered one tensor at a time. Tensors that several
    ranks hold whole, such as scalars, are taken from the lowest dp rank.
    """
    mine: dict[str, str] = {}
    for held in [*held_by_model(model), *(held_by_optimizer(model, optimizer) if optimizer else ())]:
        tensor = held.tensor.detach()
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if mesh.place.dp == 0:
            mine[held.spec.key] = digest(held.spec, held.spec.box, buffer_of(whole.cpu().contiguous()))
    return combine(_everyones(mesh, mine))


def combine(digests: dict[str, str]) -> str:
    """Return the digest of named digests, whatever their order."""
    lines = "".join(f"{key} {value}\n" for key, value in sorted(digests.items()))
    return blake3(lines.encode()).hexdigest()


def _everyones(mesh: Mesh, mine: dict[str, str]) -> dict[str, str]:
    if mesh.layout.world == 1:
        return mine
    parts: list[dict[str, str]] = [{} for _ in range(mesh.layout.world)]
    dist.all_gather_object(parts, mine)
    return {key: value for part in parts for key, value in part.items()}

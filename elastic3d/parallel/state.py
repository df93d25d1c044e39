"""Model and optimizer as tiles, and back: a rank's part of each global tensor, under names independent of the layout.

Keys are `model/<name>` for parameters and persistent buffers, `optimizer/<parameter>/<name>` for the optimizer's
tensors; its scalars, such as `step`, are tensors without dims, held by every rank that holds the parameter.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from checkpointing.format.tiles import Box, TensorSpec
from elastic3d.errors import StateUnfit
from elastic3d.planner.shares import run_of

Tile = tuple[TensorSpec, Box, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInMemory:
    """One tensor of the state as it is in memory: the module's or the optimizer's own, whole or a shard of it."""

    spec: TensorSpec
    tensor: torch.Tensor

    @property
    def box(self) -> Box:
        """Which part of the global tensor this rank holds."""
        return box_of(self.tensor)

    @property
    def local(self) -> torch.Tensor:
        """The bytes this rank holds, as a plain tensor."""
        return local(self.tensor)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of a tensor, detached."""
    # The other way round, torch would work out how a detached tensor is sharded.
    part: torch.Tensor = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return part.detach()


def sharded_like(tensor: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """Return `part` as what this rank holds of a tensor that is cut like `tensor`."""
    if not isinstance(tensor, DTensor):
        return part
    return DTensor.from_local(
        part, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def box_of(tensor: torch.Tensor) -> Box:
    """Return which part of the global tensor this rank holds: along each dim one run, all of equal length but the last.

    Tensor parallelism cuts first and FSDP cuts the rest, always along dim 0, whichever way torch says so:
    (Shard(0), Shard(1)), or (_StridedShard(0), Shard(0)) where both cut one dim.
    """
    if not isinstance(tensor, DTensor):
        return _box(tuple(tensor.shape), (), (), None)
    mesh = tensor.device_mesh
    place = mesh.get_coordinate()
    assert place is not None
    box = _box(tuple(tensor.shape), tuple(tensor.placements), tuple(place), mesh)
    assert tuple(tensor._local_tensor.shape) == box.shape, (tensor._local_tensor.shape, box)
    return box


@functools.lru_cache(maxsize=4096)
def _box(
    shape: tuple[int, ...], placements: tuple[Placement, ...], place: tuple[int, ...], mesh: DeviceMesh | None
) -> Box:
    """Do as `box_of`; few tensors of a model have a shape of their own, and all are asked after in each step."""
    start, stop = [0] * len(shape), list(shape)
    for axis in reversed(range(len(placements))):
        placement = placements[axis]
        if placement.is_replicate():
            continue
        assert isinstance(placement, Shard | _StridedShard), f"no part of a tensor: {placement}"
        assert mesh is not None
        dim = placement.dim
        first, last = run_of(stop[dim] - start[dim], mesh.size(axis), place[axis])
        start[dim], stop[dim] = start[dim] + first, start[dim] + last
    return Box(start=tuple(start), stop=tuple(stop))


def is_copy(tensor: torch.Tensor, tp: int) -> bool:
    """Return whether tensor-parallel rank 0 holds the same part. tp: this rank's number on that axis."""
    return "tp" in copied_on(tensor) if isinstance(tensor, DTensor) else tp > 0


def copied_on(tensor: torch.Tensor) -> set[str]:
    """Return the axes on which a lower rank holds the same part of a tensor."""
    if not isinstance(tensor, DTensor):
        return set()
    mesh = tensor.device_mesh
    assert mesh.mesh_dim_names
    return {
        name
        for axis, name in enumerate(mesh.mesh_dim_names)
        if tensor.placements[axis].is_replicate() and mesh.get_local_rank(axis)
    }


def specification(key: str, tensor: torch.Tensor) -> TensorSpec:
    """Return the global tensor that `tensor` is, or is a shard of."""
    return TensorSpec(key=key, dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape))


def held_by_model(model: nn.Module) -> Iterator[TensorInMemory]:
    """Yield parameters and persistent buffers."""
    for name, parameter in model.named_parameters():
        yield TensorInMemory(spec=specification(f"model/{name}", parameter), tensor=parameter)
    for name, buffer in persistent_buffers(model):
        yield TensorInMemory(spec=specification(f"model/{name}", buffer), tensor=buffer)


def persistent_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the buffers that belong to a model's state."""
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}".lstrip("."), buffer


def held_by_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[TensorInMemory]:
    """Yield the optimizer's tensors; StateUnfit for state that is not a tensor."""
    for name, parameter in model.named_parameters():
        for key, value in sorted(optimizer.state.get(parameter, {}).items()):
            if value is None:
                continue
            if not isinstance(value, torch.Tensor):
                raise StateUnfit(
                    f"{type(optimizer).__name__} keeps {key!r} of parameter {name!r} as {type(value).__name__}; only "
                    "tensors can be moved between layouts. Trying again does not help: keep it as a tensor"
                )
            yield TensorInMemory(spec=specification(f"optimizer/{name}/{key}", value), tensor=value)


def tiles_of(model: nn.Module, optimizer: torch.optim.Optimizer | None, *, tp: int = 0) -> list[Tile]:
    """Return this rank's tiles of the state, without empty shards and those that tensor-parallel rank 0 holds as well.

    Parameters and optimizer tensors are returned as they are, and must not change before they are copied. Buffers,
    which the next forward pass may change, are copied here.
    """
    buffers = {id(buffer) for _, buffer in persistent_buffers(model)}
    tiles: list[Tile] = []
    for held in [*held_by_model(model), *(held_by_optimizer(model, optimizer) if optimizer else ())]:
        box = held.box
        if box.numel and not is_copy(held.tensor, tp):
            tensor = held.local.clone() if id(held.tensor) in buffers else held.local
            tiles.append((held.spec, box, tensor))
    return tiles


def create_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer, specs: Iterable[TensorSpec]) -> None:
    """Create in a fresh optimizer the tensors that a saved state has for this rank's parameters.

    A tensor of its parameter's shape is sharded like it; any other is whole on each rank, scalars on the CPU, where
    torch keeps them unless the optimizer is capturable. Tensors that the saved state does not have are dropped.
    """
    parameters = dict(model.named_parameters())
    capturable = {
        id(p): group.get("capturable") or group.get("fused")
        for group in optimizer.param_groups
        for p in group["params"]
    }
    optimizer.state.clear()
    for spec in specs:
        if not spec.key.startswith("optimizer/"):
            continue
        name, _, key = spec.key.removeprefix("optimizer/").rpartition("/")
        if name not in parameters:
            continue
        parameter = parameters[name]
        if id(parameter) not in capturable:
            raise StateUnfit(f"the saved state has {spec.key!r}, but this optimizer was not given parameter {name!r}")
        dtype = getattr(torch, spec.dtype)
        if spec.shape == tuple(parameter.shape):
            room = sharded_like(parameter, torch.empty_like(local(parameter), dtype=dtype))
        else:
            on_device = bool(spec.shape) or capturable[id(parameter)]
            room = torch.empty(spec.shape, dtype=dtype, device=local(parameter).device if on_device else "cpu")
        optimizer.state[parameter][key] = room

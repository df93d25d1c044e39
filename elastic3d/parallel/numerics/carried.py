"""Whether an optimizer works on the parameters of this run, tried before the first step on small ones of their kinds.

torch's elementwise optimizers do, on shards alone (`local_step`). Any other works on the distributed tensors, which
know a part of torch's operations: where one is missing, the job would end in the middle of a step. And its state moves
between layouts: what is cut like its parameter is cut anew, what is alike on all ranks is copied, and nothing else can
be moved. So another optimizer of the same class and settings makes some steps on parameters of a few numbers each.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from elastic3d.errors import UsageError
from elastic3d.parallel.numerics.local_step import ELEMENTWISE
from elastic3d.parallel.peer_errors import is_lost_peer
from elastic3d.parallel.state import local

STEPS = 2
"""The first one makes the state, the second one uses it."""

_WOULD = (
    "Trying again does not help. torch's optimizers that treat each number by itself work, such as AdamW, SGD and "
    "RMSprop; so does any other whose step uses what DTensor can do, and which keeps its state as tensors of the "
    "parameter's shape, or as single numbers in tensors"
)


@dataclass(frozen=True, slots=True)
class _Kind:
    """What an optimizer can tell of a parameter: its number of dims, dtype and device, and how it is distributed."""

    dims: int
    dtype: torch.dtype
    device: torch.device
    mesh: DeviceMesh | None
    placements: tuple[Any, ...]

    @classmethod
    def of(cls, parameter: torch.Tensor, *, distributed: bool) -> _Kind:
        device = torch.device("cpu") if parameter.is_meta else local(parameter).device
        if distributed and isinstance(parameter, DTensor):
            return cls(parameter.dim(), parameter.dtype, device, parameter.device_mesh, tuple(parameter.placements))
        return cls(parameter.dim(), parameter.dtype, device, None, ())

    def made(self, draw: torch.Generator) -> torch.Tensor:
        """Return a small tensor of this kind; each rank has numbers of its own."""
        numbers = torch.randn((4, *(6,) * (self.dims - 1))[: self.dims], generator=draw)
        part = numbers.to(device=self.device, dtype=self.dtype)
        if self.mesh is None:
            return part
        return DTensor.from_local(part, self.mesh, self.placements, run_check=False)


def check_carried(optimizer: Optimizer) -> None:
    """Raise UsageError, saying why and what would do, for an optimizer that the run cannot carry.

    Neither it nor the random numbers are changed. One that is not made from parameters and its defaults is not tried. A
    collective of the ranks over which parameters are distributed, where its step is one.
    """
    if type(optimizer) in ELEMENTWISE:
        return
    with torch.random.fork_rng(devices=[]):
        _try(optimizer, distributed=False)
        if any(isinstance(one, DTensor) for group in optimizer.param_groups for one in group["params"]):
            _try(optimizer, distributed=True)


def _try(optimizer: Optimizer, *, distributed: bool) -> None:
    draw = torch.Generator().manual_seed(17)
    groups = list(_groups(optimizer, draw, distributed=distributed))
    try:
        trial = type(optimizer)(groups, **optimizer.defaults)
    except Exception:  # noqa: BLE001  # the script's own class: how it is made is not known
        return
    parameters = [parameter for group in trial.param_groups for parameter in group["params"]]
    name = type(optimizer).__name__
    where = "parameters that are distributed over ranks" if distributed else "the parameters of a run"
    try:
        for _ in range(STEPS):
            for parameter in parameters:
                parameter.grad = _Kind.of(parameter, distributed=distributed).made(draw)
            trial.step()
    except Exception as error:
        if is_lost_peer(error):
            raise
        said = " ".join(str(error).split())
        raise UsageError(f"{name} does not work on {where}: {type(error).__name__}: {said}. {_WOULD}") from error
    for parameter in parameters:
        for key, value in sorted(trial.state.get(parameter, {}).items(), key=lambda item: str(item[0])):
            if why := _unmoved(value, parameter):
                raise UsageError(
                    f"{name} keeps {key!r} of each parameter as {why}: that cannot be moved to another layout. {_WOULD}"
                )


def _groups(optimizer: Optimizer, draw: torch.Generator, *, distributed: bool) -> Iterator[dict[str, Any]]:
    """Yield the groups of the trial: with every kind of parameter that the optimizer's own have."""
    for group in optimizer.param_groups:
        kinds = dict.fromkeys(_Kind.of(parameter, distributed=distributed) for parameter in group["params"])
        options = {key: copy.deepcopy(value) for key, value in group.items() if key not in ("params", "param_names")}
        yield {**options, "params": [torch.nn.Parameter(kind.made(draw)) for kind in kinds]}


def _unmoved(value: Any, parameter: torch.Tensor) -> str:
    """Return what a part of the state is that cannot be moved between layouts, "" for what can be."""
    if value is None:
        return ""
    if not isinstance(value, torch.Tensor):
        return f"{type(value).__name__}, no tensor"
    if isinstance(value, DTensor):
        assert isinstance(parameter, DTensor)
        alike = value.shape == parameter.shape and tuple(value.placements) == tuple(parameter.placements)
        return "" if alike else f"a distributed tensor of {_shape(value)} beside a parameter of {_shape(parameter)}"
    if isinstance(parameter, DTensor) and value.dim() and value.shape == local(parameter).shape:
        return "a plain tensor that differs from rank to rank"
    return ""


def _shape(tensor: torch.Tensor) -> str:
    return str(list(tensor.shape))

"""The optimizer's step on what this rank holds, not on distributed tensors.

For each operation and shape, torch's dispatcher of distributed tensors works out how the result is sharded, by running
the operation on fake tensors: in a process's first step that takes many times as long as the arithmetic, and in later
ones still a good part of it. An optimizer that treats each element by itself does the very same to shards, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop, Rprop
from torch.optim import optimizer as hooks

from elastic3d.parallel.state import local, sharded_like

ELEMENTWISE = (ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop, Rprop)
"""torch's optimizers in which no element's update depends on another element. Subclasses may do anything."""

Parameter = torch.Tensor


def step(optimizer: Optimizer) -> None:
    """Make the optimizer's step, on this rank's shards alone where that is the same.

    A collective where it is not: an optimizer that is not torch's own, or that somebody watches by hooks, works on the
    distributed tensors.
    """
    if type(optimizer) in ELEMENTWISE and not watched(optimizer) and all(map(alike, _parameters(optimizer))):
        with _on_shards(optimizer):
            optimizer.step()
    else:
        optimizer.step()


def _parameters(optimizer: Optimizer) -> Iterator[Parameter]:
    for group in optimizer.param_groups:
        yield from group["params"]


def watched(optimizer: Any) -> bool:
    """Return whether somebody's hooks see each step of an optimizer, and may change what it makes."""
    watching: Any = hooks
    return bool(
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or watching._global_optimizer_pre_hooks
        or watching._global_optimizer_post_hooks
    )


def alike(parameter: Parameter) -> bool:
    """Return whether a parameter's gradient is cut as the parameter is."""
    grad = parameter.grad
    if grad is None or not isinstance(parameter, DTensor):
        return True
    return (
        isinstance(grad, DTensor)
        and grad.device_mesh == parameter.device_mesh
        and tuple(grad.placements) == tuple(parameter.placements)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Swapped:
    """A parameter and its shard. held: tensors of its state by name, each as a shard and as it was."""

    parameter: Parameter
    shard: Parameter
    held: dict[str, tuple[torch.Tensor, torch.Tensor]]


@contextmanager
def _on_shards(optimizer: Optimizer) -> Iterator[None]:
    """Have the optimizer hold this rank's shards within the block, and what it held before afterwards."""
    groups = [(group, group["params"], group.get("foreach")) for group in optimizer.param_groups]
    swapped: list[_Swapped] = []
    try:
        for group, parameters, foreach in groups:
            group["params"] = [_swap(optimizer, parameter, swapped) for parameter in parameters]
            if foreach is None and "foreach" in group:
                # torch's choice for distributed tensors: for plain ones it would take room for copies of them all.
                group["foreach"] = False
        yield
    finally:
        for one in swapped:
            _swap_back(optimizer, one)
        for group, parameters, foreach in groups:
            group["params"] = parameters
            if foreach is None and "foreach" in group:
                group["foreach"] = None


def _swap(optimizer: Optimizer, parameter: Parameter, swapped: list[_Swapped]) -> Parameter:
    if not isinstance(parameter, DTensor):
        return parameter
    shard = local(parameter)
    shard.grad = None if parameter.grad is None else local(parameter.grad)
    state = optimizer.state.pop(parameter, None)
    held: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    if state is not None:
        held = {key: (local(value), value) for key, value in state.items() if isinstance(value, DTensor)}
        optimizer.state[shard] = {key: held[key][0] if key in held else value for key, value in state.items()}
    swapped.append(_Swapped(parameter=parameter, shard=shard, held=held))
    return shard


def _swap_back(optimizer: Optimizer, one: _Swapped) -> None:
    state = optimizer.state.pop(one.shard, None)
    if state is not None:
        optimizer.state[one.parameter] = {key: _whole(key, value, one) for key, value in state.items()}


def _whole(key: str, value: Any, one: _Swapped) -> Any:
    shard, whole = one.held.get(key, (None, None))
    if value is shard:
        return whole
    if not isinstance(value, torch.Tensor) or not value.dim():
        return value
    return sharded_like(one.parameter, value)

"""The optimizer's step on shards: the same bits as on distributed tensors, without their dispatcher."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed import fake_pg
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from elastic3d.parallel.numerics import local_step
from elastic3d.parallel.state import local, sharded_like


@pytest.fixture
def one_of_two() -> Iterator[None]:
    """Be the second of two ranks that do not communicate, which a step of the optimizer does not either."""
    assert fake_pg
    dist.init_process_group("fake", store=dist.HashStore(), rank=1, world_size=2)
    yield
    dist.destroy_process_group()


class Distributed(TorchDispatchMode):  # type: ignore[misc]
    """Counts operations on distributed tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # What the library does to wrap and unwrap is no arithmetic.
        if "detach" not in str(func):
            self.count += any(isinstance(leaf, DTensor) for leaf in tree_leaves((args, kwargs or {})))
        return func(*args, **(kwargs or {}))


def sharded() -> nn.Module:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3, bias=False))
    return fully_shard(model, mesh=init_device_mesh("cpu", (2,)))


def give_gradients(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = sharded_like(parameter, torch.randn(local(parameter).shape, generator=generator))


OPTIONS: dict[type[torch.optim.Optimizer], dict[str, Any]] = {
    torch.optim.SGD: {"momentum": 0.9, "nesterov": True},
    torch.optim.AdamW: {"amsgrad": True},
    torch.optim.RMSprop: {"centered": True, "momentum": 0.5},
}


# torch's dispatcher refuses Rprop on shards, where it works for us.
COMPARED = [kind for kind in local_step.ELEMENTWISE if kind is not torch.optim.Rprop]


@pytest.mark.parametrize("kind", COMPARED, ids=lambda kind: kind.__name__)
def test_a_step_on_shards_has_the_bits_of_a_step_on_distributed_tensors(
    kind: type[torch.optim.Optimizer], one_of_two: None
) -> None:
    """Parameters and state, which is as it would be: distributed where the parameter is, under the same names."""
    results = []
    for step in (local_step.step, lambda optimizer: optimizer.step()):
        model = sharded()
        parameters = list(model.parameters())
        optimizer = kind(parameters, **{"lr": 0.05, **OPTIONS.get(kind, {})})  # type: ignore[call-arg]
        groups = [copy.copy(group) for group in optimizer.param_groups]
        for number in range(3):
            give_gradients(model, number)
            step(optimizer)
            optimizer.zero_grad()
        assert [id(parameter) for group in optimizer.param_groups for parameter in group["params"]] == [
            id(parameter) for parameter in parameters
        ]
        assert [group.get("foreach") for group in optimizer.param_groups] == [g.get("foreach") for g in groups]
        states = [optimizer.state[parameter] for parameter in parameters]
        assert len(optimizer.state) == len(states)
        results.append((parameters, states))
    (ours, our_states), (theirs, their_states) = results
    assert all(torch.equal(local(a), local(b)) for a, b in zip(ours, theirs, strict=True))
    for a, b in zip(our_states, their_states, strict=True):
        assert list(a) == list(b)
        for key in a:
            assert type(a[key]) is type(b[key]), key
            assert not isinstance(b[key], torch.Tensor) or torch.equal(local(a[key]), local(b[key])), key


def test_a_step_on_shards_does_no_distributed_arithmetic(one_of_two: None) -> None:
    """In a process's first step, working out how results are sharded took several times as long as the rest."""
    model = sharded()
    optimizer = torch.optim.AdamW(model.parameters())
    give_gradients(model, 0)
    with Distributed() as counted:
        local_step.step(optimizer)
    assert counted.count == 0


class Own(torch.optim.AdamW):
    """An optimizer of the user's own, which may do anything."""


def test_an_optimizer_of_unknown_kind_sees_distributed_tensors(one_of_two: None) -> None:
    """So does one that somebody watches."""
    seen: list[bool] = []
    for kind, watch in ((Own, False), (torch.optim.AdamW, True)):
        model = sharded()
        optimizer = kind(model.parameters())
        if watch:
            optimizer.register_step_pre_hook(lambda made, args, kwargs: seen.append(_distributed(made)))
        give_gradients(model, 0)
        with Distributed() as counted:
            local_step.step(optimizer)
        assert counted.count > 0
    assert seen == [True]


def _distributed(optimizer: torch.optim.Optimizer) -> bool:
    return all(isinstance(p, DTensor) for group in optimizer.param_groups for p in group["params"])


def test_a_step_that_raises_leaves_the_optimizer_as_it_was(one_of_two: None) -> None:
    """Its parameters and its state are the distributed ones again."""
    model = sharded()
    optimizer = torch.optim.AdamW(model.parameters())
    give_gradients(model, 0)
    local_step.step(optimizer)
    give_gradients(model, 1)
    optimizer.param_groups[0]["betas"] = None
    with pytest.raises(TypeError):
        local_step.step(optimizer)
    assert _distributed(optimizer)
    assert all(isinstance(state["exp_avg"], DTensor) for state in optimizer.state.values())
    assert list(optimizer.state) == list(model.parameters())

"""Between `run.backward` and `run.step` an optimizer refuses what would use up, or take away, its gradients."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed import fake_pg

from elastic3d.errors import UsageError
from elastic3d.parallel.state import local, sharded_like
from elastic3d.training.unclipped import UnclippedGradient


@pytest.fixture
def model() -> Iterator[nn.Module]:
    """Return a model that is spread over two ranks, with gradients, as the first of them has it."""
    assert fake_pg
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=2)
    made = nn.Linear(4, 4)
    fully_shard(made, mesh=init_device_mesh("cpu", (2,)))
    for parameter in made.parameters():
        parameter.grad = sharded_like(parameter, torch.ones_like(local(parameter)))
    yield made
    dist.destroy_process_group()


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("to_none", [False, True])
def test_distributed_gradients_are_not_zeroed(model: nn.Module, options: dict[str, bool], to_none: bool) -> None:
    """Whatever the optimizer does it with; afterwards it does so again."""
    optimizer = torch.optim.AdamW(model.parameters(), **options)  # type: ignore[arg-type]
    unclipped = UnclippedGradient()
    for _ in range(2):
        unclipped.hold(optimizer)
        with pytest.raises(UsageError, match=r"AdamW.zero_grad\(\) was called between .* Leave it out"):
            optimizer.zero_grad(set_to_none=to_none)
        unclipped.release(optimizer)
        assert all(bool(local(parameter.grad).all()) for parameter in model.parameters() if parameter.grad is not None)
    optimizer.zero_grad(set_to_none=to_none)
    assert not any(bool(local(parameter.grad).any()) for parameter in model.parameters() if parameter.grad is not None)


def test_an_optimizer_has_the_zero_grad_that_a_script_gave_it(model: nn.Module) -> None:
    """Scripts and libraries wrap the method of one optimizer."""
    optimizer, zeroed = torch.optim.SGD(model.parameters(), lr=0.1), []
    optimizer.zero_grad = lambda set_to_none=True: zeroed.append(set_to_none)  # type: ignore[method-assign]
    unclipped = UnclippedGradient()
    unclipped.hold(optimizer)
    unclipped.release(optimizer)
    optimizer.zero_grad()
    assert zeroed == [True]

"""Optimizers that a run cannot carry are refused before the first step, by name, with what would do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim import LBFGS, Adafactor, AdamW, Muon, SparseAdam
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers.optimization import Adafactor as AnotherAdafactor

from elastic3d.errors import UsageError
from elastic3d.parallel.numerics.carried import check_carried
from elastic3d.training import Run, run_alone
from tests.parallel.models import Model, Sentences, loss_fn


class Lion(torch.optim.Optimizer):
    """Somebody's own optimizer, by operations that distributed tensors know (Chen et al. 2023, algorithm 2)."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                mean = self.state[parameter].setdefault("mean", torch.zeros_like(parameter))
                parameter.add_(mean.mul(0.9).add(parameter.grad, alpha=0.1).sign(), alpha=-group["lr"])
                mean.mul_(0.99).add_(parameter.grad, alpha=0.01)


class Counting(Lion):
    """Keeps a number that is no tensor."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["count"] = 1


class Local(Lion):
    """Keeps a part of a distributed tensor as if it were the whole."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                part = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                self.state[parameter]["part"] = part.detach().clone()


class Averaging(Lion):
    """Keeps one number for each row."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["rows"] = parameter.detach().mean(dim=-1, keepdim=True)


class Made(Lion):
    """Is made in a way of its own, so that nobody else can make one."""

    def __init__(self, model: Any) -> None:
        super().__init__(model.parameters())


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Two ranks, of which this process is the first and the other is nowhere."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    dist.destroy_process_group()


def sharded(mesh: DeviceMesh, *shapes: tuple[int, ...]) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(DTensor.from_local(torch.ones(one), mesh, [Shard(0)])) for one in shapes]


@pytest.mark.parametrize("make", [AdamW, Lion])
def test_what_distributed_tensors_can_do_is_carried(make: Any, mesh: DeviceMesh) -> None:
    """torch's own and somebody's; neither the optimizer nor any random number is touched."""
    optimizer = make(sharded(mesh, (3, 5), (7,), (2, 3, 3, 3)))
    before = torch.get_rng_state()
    check_carried(optimizer)
    assert not optimizer.state
    assert torch.equal(torch.get_rng_state(), before)


def test_an_optimizer_of_matrices_alone_is_tried_on_matrices(mesh: DeviceMesh) -> None:
    """Muon refuses anything else."""
    check_carried(Muon(sharded(mesh, (4, 6))))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (Adafactor, "Adafactor does not work on parameters that are distributed over ranks: RuntimeError: aten"),
        (AnotherAdafactor, "Adafactor keeps 'step' of each parameter as int, no tensor"),
        (Averaging, r"Averaging keeps 'rows' .* distributed tensor of \[8, 1\] beside a parameter of \[8, 6\]"),
        (Local, "Local keeps 'part' of each parameter as a plain tensor that differs from rank to rank"),
    ],
)
def test_what_distributed_tensors_cannot_do_is_refused(make: Any, words: str, mesh: DeviceMesh) -> None:
    """It would end the job in the middle of a step, or of the first one after a change of layout."""
    with pytest.raises(UsageError, match=words) as raised:
        check_carried(make(sharded(mesh, (3, 5))))
    assert "such as AdamW, SGD and RMSprop" in str(raised.value)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (LBFGS, "LBFGS does not work on the parameters of a run: TypeError"),
        (SparseAdam, "does not support dense gradients"),
        (Counting, "Counting keeps 'count' of each parameter as int, no tensor"),
    ],
)
def test_what_no_run_can_carry_is_refused_on_one_rank(make: Any, words: str) -> None:
    """A script that is tried by hand hears of it at once."""

    def main(run: Run) -> None:
        model = run.shard(Model)
        batches = run.batches(Sentences(), global_batch=4, micro_batch=2)
        run.restore(model=model, optimizer=make(model.parameters()), batches=batches)

    with pytest.raises(UsageError, match=words):
        run_alone(main)


@pytest.mark.parametrize("make", [lambda model: Adafactor(model.parameters()), Made])
def test_what_one_rank_can_carry_trains_on_one(make: Any) -> None:
    """Whether more could is found where there are more; what cannot be made a second time is not tried."""

    def main(run: Run) -> None:
        model = run.shard(Model)
        optimizer = make(model)
        batches = run.batches(Sentences(), global_batch=4, micro_batch=2)
        run.restore(model=model, optimizer=optimizer, batches=batches)
        run.step(optimizer, loss=run.backward(model, next(batches.until(step=1)), loss_fn))
        assert run.steps == 1

    run_alone(main)

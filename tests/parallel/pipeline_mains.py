"""Mains of the pipelines' tests: 8 blocks, so that 4 ranks can have 2 stages each, and 8 micro-batches."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn

from elastic3d.training import Run
from tests.parallel.models import Block, Model, NamedPlain, Recomputing, Sentences, loss_fn


class Folded(Model):
    """The small model with blocks that return views and use a parameter twice."""

    def __init__(self) -> None:
        super().__init__(depth=8)
        for block in self.blocks:
            block.register_forward_hook(lambda _module, _args, output: output.transpose(0, 1).transpose(0, 1))
            block.norm.bias = block.norm.weight  # type: ignore[assignment, union-attr]


def train(run: Run, *, build: type[nn.Module] | None = None, precision: str = "fp32") -> str:
    """Train with dropout, clipping and a learning-rate schedule; return the digest."""
    model = run.shard(build or (lambda: Model(depth=8)), blocks="blocks", seed=3, precision=precision)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
    batches = run.batches(Sentences(), global_batch=16, micro_batch=2, seed=11)
    run.restore(model=model, optimizer=optimizer, schedule=schedule, batches=batches)
    for batch in batches.until(step=3):
        run.step(optimizer, schedule, loss=run.backward(model, batch, loss_fn), clip=0.5)
    return run.digest()


def folded(run: Run) -> str:
    """Train blocks that return views and use a parameter twice."""
    return train(run, build=Folded)


def named(run: Run) -> str:
    """Train blocks that are in a dictionary."""
    return train(run, build=NamedPlain)


class Again(Recomputing):
    """Whole blocks are recomputed in the backward pass."""

    def __init__(self) -> None:
        super().__init__(depth=8)


def recomputing(run: Run) -> str:
    """Train with activation checkpointing inside the model's forward."""
    return train(run, build=Again)


def bfloat16(run: Run) -> str:
    """Train in bf16 over fp32 state."""
    return train(run, precision="bf16")


class _Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise ValueError("of the block's backward")


class Failing(Block):
    """A block that fails in its forward or backward pass, once a run makes steps."""

    fails: ClassVar[str] = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fails == "forward":
            raise ValueError("of the block's forward")
        out: torch.Tensor = super().forward(x)
        if self.fails == "backward":
            out = _Raises.apply(out)  # type: ignore[no-untyped-call]
        return out


def failing(where: str, run: Run) -> str:
    """Train a model of which the last stage's last block fails in a pass."""

    def build() -> Model:
        model = Model()
        model.blocks[-1] = Failing(7, 0.2)
        return model

    model = run.shard(build, blocks="blocks", seed=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batches = run.batches(Sentences(), global_batch=8, micro_batch=2, seed=11)
    run.restore(model=model, optimizer=optimizer, batches=batches)
    Failing.fails = where
    for batch in batches.until(step=1):
        run.step(optimizer, loss=run.backward(model, batch, loss_fn))
    return run.digest()


def train_head(run: Run) -> str:
    """Train the head alone, which is on the last stage; return the digest."""
    model: Any = run.shard(lambda: Model(depth=8), blocks="blocks", seed=3)
    optimizer = torch.optim.SGD([{"params": list(model.head.parameters())}], lr=0.1)
    batches = run.batches(Sentences(), global_batch=16, micro_batch=2, seed=11)
    run.restore(model=model, optimizer=optimizer, batches=batches)
    for batch in batches.until(step=2):
        run.step(optimizer, loss=run.backward(model, batch, loss_fn), clip=0.5)
    return run.digest()

"""Mains whose passes take a given time, by sleeping: nodes of any speed on a machine with few cores."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn

from elastic3d.parallel.reduction.lanes import Lanes
from elastic3d.training import Run

BLOCKS = 6


class _Sleep(torch.autograd.Function):
    """Takes a third of its time forward and two thirds back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        time.sleep(seconds / 3)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        time.sleep(2 * ctx.seconds / 3)
        return gradient, None


class _Paced(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.linear, self.seconds = nn.Linear(16, 16), seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = _Sleep.apply(self.linear(x), self.seconds)  # type: ignore[no-untyped-call]
        return torch.tanh(made)


class Chain(nn.Module):
    """Blocks of which all together take `seconds` for a micro-batch."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Paced(seconds / BLOCKS) for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the last block's output."""
        for block in self.blocks:
            x = block(x)
        return x


def train(
    run: Run, *, seconds: float, slow: dict[int, float], micro_batches: int, steps: int, lanes: bool = True
) -> list[float]:
    """Make some steps; return the seconds of each but the first two.

    seconds: of a micro-batch; slow: how many times as long it takes by rank. lanes: whether fast ranks may be ahead.
    """
    if not lanes:
        Lanes.deepen = lambda *given: None  # type: ignore[method-assign]
    model = run.shard(lambda: Chain(seconds * slow.get(run.rank, 1.0)), blocks="blocks", seed=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    data = [(torch.randn(16, generator=torch.Generator().manual_seed(i)), torch.zeros(16)) for i in range(64)]
    batches = run.batches(data, global_batch=micro_batches, micro_batch=1, seed=5)
    run.restore(model=model, optimizer=optimizer, batches=batches)
    took: list[float] = []
    began = time.monotonic()
    for batch in batches.until(step=steps):
        run.step(optimizer, loss=run.backward(model, batch, nn.functional.mse_loss))
        took.append(time.monotonic() - began)
        began = time.monotonic()
    return took[2:]

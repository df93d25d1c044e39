"""A script in which the samples of one rank come late: that of `LATE`, never rank 0."""

from __future__ import annotations

import os
import sys
import time

import torch
from torch import nn

import elastic3d

STEPS, LATE = int(sys.argv[1]), 1
SECONDS = 0.08
"""For each of the eight samples of that rank in a step; they are read while the step before is made, which is short."""


class Chain(nn.Module):
    """Four blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the head's output."""
        for block in self.blocks:
            x = block(x)
        output: torch.Tensor = self.head(x)
        return output


class Samples:
    """Samples that take a while to read, on one rank."""

    def __init__(self, late: bool) -> None:
        self._late = late

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self._late:
            time.sleep(SECONDS)
        return torch.randn(8, generator=torch.Generator().manual_seed(index)), torch.zeros(4)


def main(run: elastic3d.Run) -> None:
    model = run.shard(Chain, blocks="blocks", seed=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batches = run.batches(Samples(run.rank == LATE), global_batch=16, micro_batch=8, seed=5)
    run.restore(model=model, optimizer=optimizer, batches=batches)
    for batch in batches.until(step=STEPS):
        run.step(optimizer, loss=run.backward(model, batch, nn.functional.mse_loss), clip=0.5)


if __name__ == "__main__":
    elastic3d.run(
        main, layout=elastic3d.Layout(pp=1, zero=2), events=os.environ.get("EVENTS"), health=elastic3d.Health()
    )

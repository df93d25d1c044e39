"""Train a few steps, with temporary files in the folder that the first argument names."""

from __future__ import annotations

import os
import sys

import torch
from torch import nn

import elastic3d


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def main(run: elastic3d.Run) -> None:
    model = run.shard(Chain, blocks="blocks")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = run.batches([(torch.ones(4) * i, torch.zeros(4)) for i in range(64)], global_batch=8, micro_batch=2)
    run.restore(model=model, optimizer=optimizer, batches=batches)
    for batch in batches.until(step=3):
        loss = run.backward(model, batch, nn.functional.mse_loss)
        run.step(optimizer, loss=loss)


if __name__ == "__main__":
    os.environ["TMPDIR"] = sys.argv[1]
    elastic3d.run(main, events=sys.argv[2])

"""A person's script that trains for far longer than any soak of a test."""

from __future__ import annotations

import time

import torch
from torch import nn
from torch.utils.data import Dataset

import elastic3d


class Points(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """A thousand points and their sums."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        point = torch.randn(4, generator=torch.Generator().manual_seed(index))
        return point, point.sum(0, keepdim=True)


def main(run: elastic3d.Run) -> None:
    """Train a small model, a step every twentieth of a second."""
    model = run.shard(lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)), seed=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = run.batches(Points(), global_batch=8, micro_batch=2, seed=3)
    run.restore(model=model, optimizer=optimizer, batches=batches)
    for batch in batches.until(step=100_000):
        run.step(optimizer, loss=run.backward(model, batch, nn.functional.mse_loss))
        time.sleep(0.05)


if __name__ == "__main__":
    elastic3d.run(main)

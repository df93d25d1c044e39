"""A script some of whose samples bring numbers that are not finite; a trainer may be killed while a step is redone."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections import Counter
from pathlib import Path

import torch
from torch import nn

import elastic3d

STEPS, OUT = int(sys.argv[1]), Path(sys.argv[2])
EXCLUDE = json.loads(os.environ.get("EXCLUDE", "[]"))
BAD = {7, 11, 33, 34, 60}
KILLED = OUT / "killed"


class Chain(nn.Module):
    """A chain with dropout, so that a micro-batch has random numbers of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.1)) for _ in range(3))
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the head's output."""
        for block in self.blocks:
            x = block(x)
        output: torch.Tensor = self.head(x)
        return output


def sample(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a sample; the target of a bad one is its number, and what is none."""
    target = torch.tensor([torch.nan, number, 0.0, 0.0]) if number in BAD else torch.zeros(4)
    return torch.randn(8, generator=torch.Generator().manual_seed(number)), target


def main(run: elastic3d.Run) -> None:
    model = run.shard(Chain, blocks="blocks", seed=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = [sample(number) for number in range(64)]
    batches = run.batches(data, global_batch=12, micro_batch=2, seed=5, exclude=EXCLUDE)
    run.restore(model=model, optimizer=optimizer, batches=batches)
    seen: Counter[tuple[int, int]] = Counter()

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        for number in target[target[:, 0].isnan(), 1].int().tolist():
            seen[run.steps, number] += 1
            # The second time, its step is made again.
            if seen[run.steps, number] == 2 and run.steps and "KILL" in os.environ and not KILLED.exists():
                KILLED.touch()
                os.kill(os.getpid(), signal.SIGKILL)
        return nn.functional.mse_loss(output, target)

    for batch in batches.until(step=STEPS):
        run.step(optimizer, loss=run.backward(model, batch, loss_fn), clip=0.5)
    digest = run.digest()
    if run.rank == 0:
        (OUT / "digest").write_text(digest)


if __name__ == "__main__":
    elastic3d.run(
        main,
        layout=elastic3d.Layout.parse(os.environ.get("LAYOUT", "pp=1")),
        events=os.environ.get("EVENTS"),
        snapshot_every=1,
        store=os.environ.get("STORE"),
        every=1,
        health=elastic3d.Health(numerics="skip"),
    )

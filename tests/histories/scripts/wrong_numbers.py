"""A script in which the device of one node, named by the first argument, computes wrongly from a step on."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from torch import nn

import elastic3d

LIAR, STEPS, OUT = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
FROM = int(os.environ.get("WRONG_FROM", "3"))
STORE = os.environ.get("STORE")


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


def flipped(tensor: torch.Tensor) -> torch.Tensor:
    """Return a gradient with one bit of its first number flipped."""
    changed = tensor.clone()
    changed.view(-1)[:1].view(torch.int32)[0] ^= 1 << 20
    return changed


def main(run: elastic3d.Run) -> None:
    model = run.shard(Chain, blocks="blocks", seed=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = [(torch.randn(8, generator=torch.Generator().manual_seed(i)), torch.zeros(4)) for i in range(64)]
    batches = run.batches(data, global_batch=12, micro_batch=2, seed=5)
    run.restore(model=model, optimizer=optimizer, batches=batches)
    if run._assignment.node == LIAR:
        model.blocks[1][0].register_full_backward_hook(
            lambda module, into, out: (flipped(into[0]),) if run.steps >= FROM else None
        )
    for batch in batches.until(step=STEPS):
        run.step(optimizer, loss=run.backward(model, batch, nn.functional.mse_loss), clip=0.5)
    digest = run.digest()
    if run.rank == 0:
        (OUT / "digest").write_text(digest)


if __name__ == "__main__":
    elastic3d.run(
        main,
        layout=elastic3d.Layout(pp=1),
        events=os.environ.get("EVENTS"),
        snapshot_every=1,
        store=STORE,
        every=1,
        health=elastic3d.Health(audit=os.environ.get("AUDIT", "100%")),
    )

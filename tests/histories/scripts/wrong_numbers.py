"""A script in which the device of one node, named by the first argument, computes wrongly from a step on.

SLOW: seconds for which each step of the first generation waits, for a node that joins.
Or, with ALTERED=3,4, in which a bit of its parameters changes in its memory in each of these steps, once in the job.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import DTensor

import elastic3d

LIAR, STEPS, OUT = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
FROM = int(os.environ.get("WRONG_FROM", "3"))
STORE = os.environ.get("STORE")
SLOW = float(os.environ.get("SLOW", "0"))
ALTERED = [int(step) for step in os.environ.get("ALTERED", "").split(",") if step]


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
    """Return a gradient with one bit of each number flipped: of a single one, dropout would leave nothing at times."""
    changed = tensor.contiguous().clone()
    changed.view(torch.int32).bitwise_xor_(1 << 20)
    return changed


def alter(parameter: torch.Tensor, step: int) -> None:
    """Change a bit of a parameter as memory does, once in the job: torch counts no write."""
    try:
        (OUT / f"altered{step}").touch(exist_ok=False)
    except FileExistsError:
        return
    flat = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
    flat.data.view(-1)[:1].view(torch.int32)[0] ^= 1 << 20


def main(run: elastic3d.Run) -> None:
    model = run.shard(Chain, blocks="blocks", seed=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = [(torch.randn(8, generator=torch.Generator().manual_seed(i)), torch.zeros(4)) for i in range(64)]
    batches = run.batches(data, global_batch=12, micro_batch=2, seed=5)
    run.restore(model=model, optimizer=optimizer, batches=batches)
    if run._assignment.node == LIAR and not ALTERED:
        model.blocks[1][0].register_full_backward_hook(
            lambda module, into, out: (flipped(into[0]),) if run.steps >= FROM else None
        )

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if run._assignment.node == LIAR and run.steps in ALTERED:
            alter(next(model.parameters()), run.steps)
        return nn.functional.mse_loss(output, target)

    for batch in batches.until(step=STEPS):
        if run.generation == 1:
            time.sleep(SLOW)
        run.step(optimizer, loss=run.backward(model, batch, loss_fn), clip=0.5)
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
        health=elastic3d.Health(
            audit="off" if ALTERED else os.environ.get("AUDIT", "100%"), at_rest="100%" if ALTERED else "0.5%"
        ),
    )

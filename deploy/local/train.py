"""A small job to begin with: put in your model, your data and your loss.

By hand it trains alone, in one process, and keeps nothing: `python train.py 50`. Under torchrun it is a job.
"""

import sys

import torch
from torch import nn
from torch.nn.functional import mse_loss

import elastic3d

# Where checkpoints go: a folder or an object store that every node reaches.
STORE = "./checkpoints"
STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 3000


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.linear(self.norm(x)))


class Net(nn.Module):
    """An ordinary module: a chain, with a ModuleList of repeated blocks, of which pipeline stages are made."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 64)
        self.blocks = nn.ModuleList(Block(64) for _ in range(4))
        self.last = nn.Linear(64, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class Sums(torch.utils.data.Dataset):
    """Sample k is a vector drawn from k, and the sine of its sum."""

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(16, generator=torch.Generator().manual_seed(k))
        return x, torch.sin(x.sum()).reshape(1)


def main(run: elastic3d.Run) -> None:
    # Entered anew whenever nodes come or go: what is made here is made for the nodes that are there now.
    model = run.shard(Net, blocks="blocks", seed=17)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    # Both are constants of the run, on however many nodes: the samples of a step, and those computed at once.
    batches = run.batches(Sums(), global_batch=32, micro_batch=4, seed=17)
    # From other nodes' memory, or from the store; at the first start of all, nothing.
    run.restore(model=model, optimizer=optimizer, batches=batches)
    for batch in batches.until(step=STEPS):
        loss = run.backward(model, batch, mse_loss)
        run.step(optimizer, loss=loss, clip=1.0)
        if run.rank == 0 and run.steps % 10 == 0:
            print(f"step {run.steps}: loss {loss.value:.4f}, {run.world} ranks", flush=True)


if __name__ == "__main__":
    # A checkpoint is due every 10 steps; "5m" and "continuous" will do as well.
    elastic3d.run(main, store=STORE, every=10)

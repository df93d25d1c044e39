"""A script with one thing wrong, chosen by its first argument, or nothing (`good`); torchrun starts it in the tests."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from torch import nn

import elastic3d
from elastic3d.log import process_log


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Loop(Chain):
    """Its head is used before and after the blocks: no chain."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.head(x))


def main(run: elastic3d.Run) -> None:
    kind = sys.argv[1]
    model = run.shard(Loop if kind == "loop" else Chain, blocks="layers" if kind == "blocks" else "blocks")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = [(torch.ones(4) * i, torch.zeros(4)) for i in range(64)]
    if "LISTED_BACKWARDS" in os.environ:
        data.reverse()
    batches = run.batches(data, global_batch=8, micro_batch=3 if kind == "batch" else 2)
    run.restore(model=model, optimizer=optimizer, batches=batches)
    print(f"the trainer of rank {run.rank} speaks")
    if kind == "log":
        process_log().emit("cache.unfit", error="said by a trainer")
    if "NEEDED_FILE" in os.environ:
        open(os.environ["NEEDED_FILE"]).close()
    for batch in batches.until(step=int(sys.argv[2]) if len(sys.argv) > 2 else 3):
        if kind == "raise" and run.steps == 2:
            raise KeyError("the user's own mistake")
        if kind == "memory" and run.steps == 2:
            torch.empty(1 << 50)
        loss = run.backward(model, batch, nn.functional.mse_loss)
        run.step(optimizer, loss=loss)
        if kind == "evaluate" and run.steps % 3 == 0:
            raise KeyError("the evaluation's own mistake")
        if kind == "flaky" and run.steps % 4 == 0:
            # Fails when it is first tried.
            tried = Path(os.environ["TRIED"], f"{run.steps}-{run.rank}")
            if not tried.exists():
                tried.touch()
                raise KeyError("the evaluation's passing mistake")
            print(f"step {run.steps} is evaluated")


if __name__ == "__main__":
    if sys.argv[1] == "flaky":
        store = Path(os.environ["TRIED"], "store")
        elastic3d.run(main, store=store, every=4, snapshot_every=0)
        sys.exit()
    elastic3d.run(main, store="/proc/nowhere/store" if sys.argv[1] == "store" else None)

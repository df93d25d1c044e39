"""A script that logs numbers of its own, evaluates and ends its run; trainers may be killed in the middle of each."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
from torch import nn

import elastic3d

STEPS, STOP_AT, OUT = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
EVERY = 3


class Chain(nn.Module):
    """A chain of a few blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the head's output."""
        for block in self.blocks:
            x = block(x)
        output: torch.Tensor = self.head(x)
        return output


def sample(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(8, generator=torch.Generator().manual_seed(number)), torch.zeros(4)


def square(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the mean square of each sample's output."""
    return output.square().mean(1)


def die_once(run: elastic3d.Run, when: str) -> None:
    """Have the first rank killed here, if that is asked for and has not happened."""
    mark = OUT / f"killed-{when}"
    if run.is_first and when in os.environ.get("KILL", "").split() and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def main(run: elastic3d.Run) -> None:
    model = run.shard(Chain, blocks="blocks", seed=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    held_out = [sample(number) for number in range(100, 111)]
    batches = run.batches([sample(number) for number in range(64)], global_batch=12, micro_batch=2, seed=5)
    run.restore(model=model, optimizer=optimizer, batches=batches, accept=os.environ.get("ACCEPT", ()))

    def metric(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if run.steps == 2 * EVERY:
            die_once(run, "evaluating")
        return square(output, target)

    for batch in batches.until(step=STEPS):
        if run.steps % EVERY == 0:
            run.log(**{"eval/square": run.evaluate(model, held_out, metric)})
        loss = run.backward(model, batch, nn.functional.mse_loss)
        run.log(square=run.steps**2, third=run.steps / 3)
        if run.rank == run.world - 1:
            run.log(reduce="sum", alone=torch.tensor(run.steps + 0.5))
        if run.steps == 4:
            die_once(run, "logged")
        if run.rank == run.world - 1 and run.steps + 1 == STOP_AT:
            run.stop("it is good enough")
        run.step(optimizer, loss=loss, clip=0.5)
    if run.steps == STOP_AT:
        die_once(run, "stopped")


if __name__ == "__main__":
    elastic3d.run(
        main,
        layout=elastic3d.Layout.parse("pp=1"),
        events=os.environ["EVENTS"],
        snapshot_every=1,
        store=os.environ["STORE"],
        every=100,
        trackers=[f"csv:{OUT}/curves.csv", f"jsonl:{OUT}/curves.jsonl", f"tensorboard:{OUT}/board"],
    )

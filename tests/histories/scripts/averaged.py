"""Train the demo's model with an average of its weights and a log of losses, which are updated after each step."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import elastic3d
from chaos.scripts.train_gpt import GPT, SourceFiles, arguments, cross_entropy, report, start


class Losses:
    """The best loss so far, and the weighted sum of all."""

    def __init__(self) -> None:
        self.best, self.sum = float("inf"), torch.zeros((), dtype=torch.float64)

    def add(self, loss: float) -> None:
        """Count the loss of a step."""
        self.best = min(self.best, loss)
        self.sum = self.sum * 0.75 + loss

    def state_dict(self) -> dict[str, Any]:
        """Return both."""
        return {"best": self.best, "sum": self.sum}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take both."""
        self.best, self.sum = state["best"], state["sum"]


def main(run: elastic3d.Run) -> None:
    """Train; entered once per generation."""
    options, losses = arguments(), Losses()
    model = run.shard(lambda: GPT(width=options.width, blocks=options.blocks, context=options.context), blocks="blocks")
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))  # type: ignore[no-untyped-call]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    data = SourceFiles(options.context)
    batches = run.batches(data, global_batch=options.global_batch, micro_batch=options.micro_batch, seed=options.seed)
    run.restore(model=model, optimizer=optimizer, batches=batches, extra={"ema": ema, "losses": losses})
    for batch in batches.until(step=options.steps):
        time.sleep(options.pause)
        loss = run.backward(model, batch, cross_entropy)
        run.step(optimizer, loss=loss, clip=1.0)
        ema.update_parameters(model)
        losses.add(loss.item())
    assert int(ema.n_averaged) == options.steps
    report(run, options.out)


if __name__ == "__main__":
    start(main, arguments())

"""Train the demo's model from weights that exist: those of another run's newest checkpoint."""

from __future__ import annotations

import os
import time

import torch

import elastic3d
from chaos.scripts.train_gpt import GPT, SourceFiles, arguments, cross_entropy, report, start

WEIGHTS = "ELASTIC3D_TEST_WEIGHTS"


def main(run: elastic3d.Run) -> None:
    """Train; entered once per generation."""
    options = arguments()
    model = run.shard(
        lambda: GPT(width=options.width, blocks=options.blocks, context=options.context),
        blocks="blocks",
        weights=os.environ[WEIGHTS],
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    data = SourceFiles(options.context)
    batches = run.batches(data, global_batch=options.global_batch, micro_batch=options.micro_batch, seed=options.seed)
    run.restore(model=model, optimizer=optimizer, batches=batches)
    for batch in batches.until(step=options.steps):
        time.sleep(options.pause)
        run.step(optimizer, loss=run.backward(model, batch, cross_entropy), clip=1.0)
    report(run, options.out)


if __name__ == "__main__":
    start(main, arguments())

"""Train the demo's model with a global batch that follows the gradient's noise, which is small at first."""

from __future__ import annotations

import time

import torch

import elastic3d
from chaos.scripts.train_gpt import GPT, SourceFiles, arguments, cross_entropy, report, start


def main(run: elastic3d.Run) -> None:
    """Train; entered once per generation."""
    options = arguments()
    model = run.shard(lambda: GPT(width=options.width, blocks=options.blocks, context=options.context), blocks="blocks")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    least = options.global_batch
    batches = run.batches(
        SourceFiles(options.context),
        global_batch=elastic3d.Adaptive(
            least,
            4 * least,
            start=4 * least,
            multiple=options.micro_batch,
            every=4,
            measured_every=1,
            memory=3,
            margin=0.1,
            most=1.5,
            learning_rate="adascale",
        ),
        micro_batch=options.micro_batch,
        seed=options.seed,
    )
    run.restore(model=model, optimizer=optimizer, batches=batches)
    for batch in batches.until(step=options.steps):
        time.sleep(options.pause)
        run.step(optimizer, loss=run.backward(model, batch, cross_entropy), clip=1.0)
    report(run, options.out)


if __name__ == "__main__":
    start(main, arguments())

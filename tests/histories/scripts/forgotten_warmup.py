"""Train the demo's model, with a mistake in the script: how far its warm-up is, is in no state that is restored."""

from __future__ import annotations

import torch
from torch import Tensor

import elastic3d
from chaos.scripts.train_gpt import GPT, SourceFiles, arguments, cross_entropy, start

WARM = 8
"""Steps until the loss counts in full."""


def main(run: elastic3d.Run) -> None:
    """Train; the warm-up begins anew in each generation."""
    options, made = arguments(), 0

    def warming(logits: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(logits, target) * min(1.0, made / WARM)

    model = run.shard(lambda: GPT(width=options.width, blocks=options.blocks, context=options.context), blocks="blocks")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    data = SourceFiles(options.context)
    batches = run.batches(data, global_batch=options.global_batch, micro_batch=options.micro_batch, seed=options.seed)
    run.restore(model=model, optimizer=optimizer, batches=batches)
    for batch in batches.until(step=options.steps):
        made += 1
        loss = run.backward(model, batch, warming)
        run.step(optimizer, loss=loss, clip=1.0)


if __name__ == "__main__":
    start(main, arguments())

"""Train a GPT whose sequences are cut into four chunks; options as in chaos/scripts/train_gpt.py."""

from __future__ import annotations

import time

import torch
from torch import Tensor

import elastic3d
from chaos.scripts import train_gpt

CHUNKS = 4


class GPT(train_gpt.GPT):
    """The same model, which is told the positions of a chunk."""

    def forward(self, text: Tensor, positions: Tensor | None = None) -> Tensor:
        if positions is None:
            positions = torch.arange(text.shape[1], device=text.device).unsqueeze(0)
        x = self.embedding.byte(text) + self.embedding.place(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def main(run: elastic3d.Run) -> None:
    """Train; entered once per generation."""
    model = run.shard(
        lambda: GPT(width=options.width, blocks=options.blocks, context=options.context), blocks="blocks", chunks=CHUNKS
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    data = train_gpt.SourceFiles(options.context)
    batches = run.batches(data, global_batch=options.global_batch, micro_batch=options.micro_batch, seed=options.seed)
    run.restore(model=model, optimizer=optimizer, batches=batches)
    for batch in batches.until(step=options.steps):
        time.sleep(options.pause)
        loss = run.backward(model, batch, train_gpt.cross_entropy)
        run.step(optimizer, loss=loss, clip=1.0)
    train_gpt.report(run, options.out)


if __name__ == "__main__":
    options = train_gpt.arguments()
    train_gpt.start(main, options)

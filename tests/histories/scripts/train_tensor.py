"""Train a GPT with tensor-parallel layers on several devices of a node; options as in chaos/scripts/train_gpt.py."""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn
from torch.nn import functional

import elastic3d
from chaos.scripts import train_gpt

PLAN = {
    "embedding": "split",
    "blocks.*.norm?": "sequence",
    "blocks.*.[qkv]": "column",
    "blocks.*.out": "row",
    "blocks.*.up": "column",
    "blocks.*.down": "row",
    "norm": "sequence",
    "head": "column-gathered",
}


class Block(nn.Module):
    """Attention and a feed-forward part, with layers of their own for q, k and v."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads, self.size = heads, width // heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm1(x)
        q, k, v = (layer(normed).unflatten(-1, (-1, self.size)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).flatten(2)))
        return x + self.dropout(self.down(functional.gelu(self.up(self.norm2(x)))))


class GPT(train_gpt.GPT):
    """The same chain over these blocks."""

    def __init__(self, *, width: int, blocks: int, context: int, heads: int = 4, dropout: float = 0.1) -> None:
        super().__init__(width=width, blocks=0, context=context)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(blocks))


def main(run: elastic3d.Run) -> None:
    """Train; entered once per generation."""
    model = run.shard(
        lambda: GPT(width=options.width, blocks=options.blocks, context=options.context), blocks="blocks", tensor=PLAN
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

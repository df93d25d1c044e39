"""A decoder over long sequences, and mains that train it with its sequences cut into chunks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from elastic3d.training import Run
from tests.parallel.agreed import trained
from tests.parallel.models import Sentences

VOCABULARY, LENGTH, CHUNKS = 29, 24, 4


def turned(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return heads (batch, heads, sequence, size) turned by their positions."""
    size = x.shape[-1] // 2
    angles = positions.unsqueeze(-1) / 10.0 ** (torch.arange(size) / size)
    cos, sin = (wave.unsqueeze(1).to(x.dtype) for wave in (angles.cos(), angles.sin()))
    one, other = x[..., :size], x[..., size:]
    return torch.cat([one * cos - other * sin, one * sin + other * cos], dim=-1)


class Block(nn.Module):
    """Attention with grouped queries and rotary positions. `odd` is used by some chunks alone, and `never` by none.

    Without dropout all of it is computed alike for each position.
    """

    def __init__(self, width: int, heads: int, dropout: float, *, causal: bool) -> None:
        super().__init__()
        self.dropped = dropout > 0
        self.size, self.causal = width // heads, causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v = nn.Linear(width, width), nn.Linear(width, width // 2), nn.Linear(width, width // 2)
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width, bias=False), nn.Linear(2 * width, width)
        self.odd, self.never = nn.Parameter(torch.ones(width)), nn.Parameter(torch.ones(3))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        normed = self.norm1(x)
        q, k, v = (self._heads(layer(normed)) for layer in (self.q, self.k, self.v))
        mixed = scaled_dot_product_attention(
            turned(q, positions),
            turned(k, positions),
            v,
            is_causal=self.causal,
            dropout_p=self.dropout.p if self.training else 0.0,
            enable_gqa=True,
        )
        x = x + self.dropout(self.out(mixed.transpose(1, 2).flatten(2)))
        if self.dropped and not x.is_meta and float(x.detach()[0, 0, 0]) > 0:
            x = x * self.odd
        return x + self.dropout(self.down(nn.functional.gelu(self.up(self.norm2(x)))))

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(x.shape[0], x.shape[1], -1, self.size).transpose(1, 2)


class Decoder(nn.Module):
    """A chain of embedding, blocks, norm and head, which is told the positions of its tokens, or counts them."""

    def __init__(self, dropout: float = 0.1, *, depth: int = 2, width: int = 16, causal: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, 4, dropout, causal=causal) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.register_buffer("scale", torch.ones(2))

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        where = torch.arange(tokens.shape[1]).unsqueeze(0) if positions is None else positions
        x = self.drop(self.embed(tokens))
        for block in self.blocks:
            x = block(x, where)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def mean(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy."""
    return cross_entropy(logits.flatten(0, 1).float(), target.flatten())


def counted(logits: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum over the tokens that are not the first word, and their number."""
    known = target != 0
    each = cross_entropy(logits.flatten(0, 1).float(), target.flatten(), reduction="none")
    return (each * known.flatten()).sum(), known.sum()


def train(
    run: Run,
    *,
    chunks: int = CHUNKS,
    dropout: float = 0.1,
    causal: bool = True,
    steps: int = 3,
    loss_fn: Any = mean,
    exclude: tuple[tuple[int, int], ...] = (),
    **options: Any,
) -> tuple[str, list[float], list[float]]:
    """Train with clipping and 7 micro-batches a step; return digest, losses and norms."""
    model = run.shard(lambda: Decoder(dropout, causal=causal), blocks="blocks", seed=3, chunks=chunks, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = Sentences(VOCABULARY, LENGTH)
    batches = run.batches(data, global_batch=14, micro_batch=2, seed=11, exclude=exclude)
    run.restore(model=model, optimizer=optimizer, batches=batches)
    return trained(run, model, optimizer, batches.until(step=steps), loss_fn)


def train_uncut(run: Run) -> tuple[str, list[float], list[float]]:
    """Train without dropout on whole sequences."""
    return train(run, chunks=1, dropout=0.0)


def train_plain(run: Run) -> tuple[str, list[float], list[float]]:
    """Train without dropout on chunks."""
    return train(run, dropout=0.0)


def train_again(run: Run) -> tuple[str, list[float], list[float]]:
    """Train with every block computed again in its backward pass."""
    return train(run, recompute="full")


def train_counted(run: Run) -> tuple[str, list[float], list[float]]:
    """Train in bf16 with a loss over some tokens, a micro-batch left out and blocks computed again."""
    return train(run, loss_fn=counted, precision="bf16", recompute="full", exclude=((4, 8),))


def train_leaves(run: Run) -> tuple[str, list[float], list[float]]:
    """Train with the micro-batches of a step in one leaf."""
    return train(run, leaf=7, steps=2)


def train_both_ways(run: Run) -> tuple[str, list[float], list[float]]:
    """Train without dropout, with attention to later positions as well."""
    return train(run, dropout=0.0, causal=False)


def train_both_ways_uncut(run: Run) -> tuple[str, list[float], list[float]]:
    """The same on whole sequences."""
    return train(run, chunks=1, dropout=0.0, causal=False)


def right(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return which share of each sample's tokens is right."""
    return (logits.argmax(-1) == target).float().mean(1)


def train_evaluated(run: Run) -> list[float]:
    """Train, and evaluate before each step."""
    model = run.shard(Decoder, blocks="blocks", seed=3, chunks=CHUNKS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = Sentences(VOCABULARY, LENGTH)
    batches = run.batches(data, global_batch=4, micro_batch=2, seed=11)
    run.restore(model=model, optimizer=optimizer, batches=batches)
    found = []
    for batch in batches.until(step=2):
        found.append(run.evaluate(model, data, right))
        run.step(optimizer, loss=run.backward(model, batch, mean))
    return [*found, run.evaluate(model, data, right)]


def train_shifting(run: Run) -> None:
    """Train by a loss that shifts its targets."""
    train(run, loss_fn=lambda logits, target: mean(logits[:, :-1], target[:, 1:]))


def train_watched(run: Run) -> None:
    """Train on whole sequences."""
    train(run, chunks=1)

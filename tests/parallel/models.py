"""Small models with everything that could distinguish one layout from another."""

from __future__ import annotations

from typing import cast

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset

VOCABULARY, LENGTH = 29, 5


class Sentences(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Sample i is a sequence of `length` tokens made from i, and the same one token later."""

    def __init__(self, vocabulary: int = VOCABULARY, length: int = LENGTH) -> None:
        self.vocabulary, self.length = vocabulary, length

    def __len__(self) -> int:
        return 37

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        made = torch.Generator().manual_seed(index)
        tokens = torch.randint(0, self.vocabulary, (self.length + 1,), generator=made)
        return tokens[:-1], tokens[1:]


class Block(nn.Module):
    """A residual block with dropout. `odd` is used only for micro-batches whose activation says so."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width)
        self.odd = nn.Parameter(torch.ones(width))
        self.never = nn.Parameter(torch.ones(3))
        self.down = nn.Linear(3 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.gelu(self.up(self.norm(x)))
        if float(x.detach()[0, 0, 0]) > 0:
            x = x * self.odd
        return x + self.dropout(self.down(hidden))


class Model(nn.Module):
    """Embedding, dropout, blocks, norm, head: a chain. Widths are chosen so that shards come out uneven."""

    def __init__(
        self, depth: int = 4, width: int = 7, dropout: float = 0.2, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY)
        self.register_buffer("scale", torch.ones(2))
        self.to(dtype)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.embed(tokens))
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


class PlainBlock(nn.Module):
    """A block whose forward depends on no value, so that it runs on meta."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor, places: torch.Tensor | None = None) -> torch.Tensor:
        x = x + self.dropout(torch.tanh(self.up(self.norm(x))))
        return x if places is None else x + places


class Plain(nn.Module):
    """A chain with a table of positions, which has no parameters and runs on every stage."""

    def __init__(self, depth: int = 3, width: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.drop = nn.Dropout(0.1)
        self.places = Places(width)
        self.blocks = nn.ModuleList(PlainBlock(width) for _ in range(depth))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.embed(tokens))
        places = self.places(x)
        for block in self.blocks:
            x = block(x, places)
        logits: torch.Tensor = self.head(x)
        return logits


class NamedPlain(Plain):
    """The same with its blocks in a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        names = ("first", "second", "10")
        self.blocks = nn.ModuleDict(dict(zip(names, self.blocks, strict=True)))  # type: ignore[assignment]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.embed(tokens))
        places, blocks = self.places(x), cast(nn.ModuleDict, self.blocks)
        for block in blocks.values():
            x = block(x, places)
        logits: torch.Tensor = self.head(x)
        return logits


class Places(nn.Module):
    """Sines of positions; a buffer that is no state."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("waves", torch.arange(1.0, width + 1), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(torch.arange(x.shape[1]).unsqueeze(1) * self.waves) * 0.01


class Recomputing(Model):
    """The model with whole blocks recomputed in the backward pass, dropout included."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.embed(tokens))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def loss_fn(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy."""
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), target.flatten())

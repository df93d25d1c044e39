"""A small GPT with attention, and sentences to train it on: the model of the timed steps."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset

VOCABULARY = 1000
LENGTH = 64
HEAD = 32
"""Width of an attention head."""


class Sentences(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Sample i is a sequence made from i."""

    def __len__(self) -> int:
        return 1 << 16

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.randint(0, VOCABULARY, (LENGTH + 1,), generator=torch.Generator().manual_seed(index))
        return tokens[:-1], tokens[1:]


class Embedding(nn.Module):
    """Tokens and their places."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(LENGTH, width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return (batch, length, width)."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        embedded: torch.Tensor = self.tokens(tokens) + self.places(places)
        return embedded


class Block(nn.Module):
    """Causal attention and a feed-forward layer: 12 * width ** 2 parameters and a few."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block's output, of the shape of its input."""
        batch, length, width = x.shape
        q, k, v = self.qkv(self.first(x)).view(batch, length, 3, -1, HEAD).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        fed: torch.Tensor = x + self.down(functional.gelu(self.up(self.second(x))))
        return fed


class GPT(nn.Module):
    """Embedding, blocks, head. A part that another pipeline stage has may be None, as in a model cut by hand."""

    def __init__(self, *, width: int, depth: int) -> None:
        super().__init__()
        self.embedding: nn.Module | None = Embedding(width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head: nn.Module | None = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits, or on an earlier stage what goes to the next."""
        if self.embedding is not None:
            x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return x if self.head is None else self.head(x)


def loss_fn(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy."""
    return functional.cross_entropy(logits.flatten(0, 1), target.flatten())

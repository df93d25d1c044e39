"""A decoder whose layers can be cut, its plans, and mains that train it."""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
from torch import nn
from torch.nn import functional

from elastic3d.training import Run
from tests.parallel.agreed import trained
from tests.parallel.models import Sentences, loss_fn

VOCABULARY, LENGTH = 32, 6


class Embed(nn.Module):
    """Tokens and their places."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(VOCABULARY, width), nn.Embedding(LENGTH, width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        whole: torch.Tensor = self.token(tokens) + self.place(torch.arange(tokens.shape[1], device=tokens.device))
        return whole


class Block(nn.Module):
    """Attention and a feed-forward part. `gain` is in no plan; the heads are normed, which is partial work."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads, self.size = heads, width // heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.q_norm = nn.LayerNorm(self.size)
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width, bias=False), nn.Linear(2 * width, width)
        self.gain = nn.Parameter(torch.ones(width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm1(x)
        q, k, v = (self._heads(layer(normed)) for layer in (self.q, self.k, self.v))
        mixed = functional.scaled_dot_product_attention(
            self.q_norm(q), k, v, is_causal=True, dropout_p=self.dropout.p if self.training else 0.0
        )
        x = x + self.dropout(self.out(mixed.transpose(1, 2).flatten(2)))
        return x * self.gain + self.dropout(self.down(functional.gelu(self.up(self.norm2(x)))))

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(x.shape[0], x.shape[1], -1, self.size).transpose(1, 2)


class Decoder(nn.Module):
    """A chain of embeddings, blocks, norm and head. Widths leave uneven shards to three replicas."""

    def __init__(self, dropout: float = 0.1, *, depth: int = 2, width: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.embed = Embed(width)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.register_buffer("scale", torch.ones(2))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.embed(tokens))
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


WHOLE = {
    "embed.token": "row",
    "blocks.*.[qkv]": "column",
    "blocks.*.q_norm": "summed",
    "blocks.*.out": "row",
    "blocks.*.up": "column",
    "blocks.*.down": "row",
    "head": "column-gathered",
}
"""Activations between layers are whole on each rank."""

SEQUENCE = {name: style for name, style in WHOLE.items() if name != "embed.token"} | {
    "embed": "split",
    "blocks.*.norm?": "sequence",
    "norm": "sequence",
}
"""Activations between layers are parts of the sequence."""


def train(
    run: Run,
    *,
    plan: dict[str, str] = SEQUENCE,
    dropout: float = 0.1,
    steps: int = 4,
    recompute: str = "none",
    thaw: str = "",
    leaf: int = 1,
) -> tuple[str, list[float], list[float]]:
    """Train the decoder with clipping; return digest, losses and norms.

    thaw: what the names of parameters contain that are built frozen, and trained from the third step on.
    """

    def build() -> Decoder:
        built = Decoder(dropout)
        for name, parameter in built.named_parameters():
            parameter.requires_grad_(not thaw or thaw not in name)
        return built

    model = run.shard(build, blocks="blocks", tensor=plan, seed=3, recompute=recompute, leaf=leaf)
    held = [parameter for name, parameter in model.named_parameters() if thaw and thaw in name]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
    size = 14 if leaf == 1 else 4 * leaf
    batches = run.batches(Sentences(VOCABULARY, LENGTH), global_batch=size, micro_batch=2, seed=11)
    run.restore(model=model, optimizer=optimizer, schedule=schedule, batches=batches)
    losses = []
    for batch in batches.until(step=steps):
        for parameter in held:
            parameter.requires_grad_(batch.step >= 2)
        loss = run.backward(model, batch, loss_fn)
        run.step(optimizer, schedule, loss=loss, clip=0.5)
        losses.append(loss.value)
    return run.digest(), losses, [record.gradient_norm for record in run._port.records]  # type: ignore[attr-defined]


def train_again(run: Run) -> tuple[str, list[float], list[float]]:
    """The same with every block computed again in its backward pass."""
    return train(run, recompute="full")


def train_thawed(run: Run) -> tuple[str, list[float], list[float]]:
    """The same with norms that are trained from the third step on."""
    return train(run, thaw="norm")


def train_in_leaves(run: Run) -> tuple[str, list[float], list[float]]:
    """The same with two leaves of three micro-batches a step."""
    return train(run, leaf=3)


def train_plain(run: Run) -> tuple[str, list[float], list[float]]:
    """The same without dropout, whose numbers depend on tp."""
    return train(run, dropout=0.0)


def train_whole(run: Run) -> tuple[str, list[float], list[float]]:
    """The same with whole activations between layers."""
    return train(run, plan=WHOLE)


def train_whole_plain(run: Run) -> tuple[str, list[float], list[float]]:
    """The same with whole activations and without dropout."""
    return train(run, plan=WHOLE, dropout=0.0)


def train_two(run: Run) -> tuple[str, list[float], list[float]]:
    """Train for two steps, or, from two steps on, not at all."""
    return train(run, steps=2)


def train_unsaid(run: Run) -> None:
    """Train with a plan that leaves out the norm of the heads, of which each rank does a part."""
    train(run, plan={name: style for name, style in WHOLE.items() if "q_norm" not in name})


def train_wrongly(run: Run) -> None:
    """Train with norms whose output is plain parts of the sequence."""
    train(run, plan=SEQUENCE | {"blocks.*.norm?": "summed"})


def train_unplanned(run: Run) -> None:
    """Train without a plan."""
    run.shard(Decoder, blocks="blocks")


def train_too_wide(run: Run) -> None:
    """Train four heads over three ranks."""
    run.shard(Decoder, blocks="blocks", tensor=SEQUENCE)


def train_apart(run: Run) -> None:
    """Train on two nodes of one slot."""
    run._assignment = replace(run._assignment, node=f"node {run.rank}")
    run.shard(Decoder, blocks="blocks", tensor=SEQUENCE)


def measured(run: Run) -> None:
    """Go up to restore, as a measuring trainer does."""
    model = run.shard(Decoder, blocks="blocks", tensor=SEQUENCE)
    batches = run.batches(Sentences(VOCABULARY, LENGTH), global_batch=14, micro_batch=2, seed=11)
    run.restore(model=model, optimizer=torch.optim.AdamW(model.parameters()), batches=batches)


DEEP, ROUNDS = 8, 8
"""Blocks of the deep decoder, and micro-batches of its steps."""


def train_deep(
    run: Run, *, dropout: float = 0.0, steps: int = 3, leaf: int = 1
) -> tuple[str, list[float], list[float]]:
    """Train a deep, narrow decoder that can have many stages; return digest, losses and norms."""
    build = functools.partial(Decoder, dropout, depth=DEEP, width=8, heads=2)
    model = run.shard(build, blocks="blocks", tensor=SEQUENCE, seed=3, leaf=leaf)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batches = run.batches(Sentences(VOCABULARY, LENGTH), global_batch=2 * ROUNDS, micro_batch=2, seed=11)
    run.restore(model=model, optimizer=optimizer, batches=batches)
    return trained(run, model, optimizer, batches.until(step=steps), loss_fn)


def train_drawn(run: Run) -> tuple[str, list[float], list[float]]:
    """The same with dropout, for longer."""
    return train_deep(run, dropout=0.1, steps=6)


def train_leaves(run: Run) -> tuple[str, list[float], list[float]]:
    """The same with leaves of two micro-batches."""
    return train_deep(run, leaf=2)


def train_drawn_leaves(run: Run) -> tuple[str, list[float], list[float]]:
    """The same with dropout, for longer."""
    return train_deep(run, dropout=0.1, steps=6, leaf=2)

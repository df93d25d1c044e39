"""Mixtures of experts, our own layer and transformers', and how they are trained: importable, like a script."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from elastic3d.parallel.experts import Top2
from elastic3d.parallel.state import local
from elastic3d.training import Run
from tests.parallel.architectures.families import logits_loss, mixtral
from tests.parallel.models import VOCABULARY, Sentences, loss_fn

STEPS = 4
EXPERTS = 4


class Expert(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(torch.tanh(self.up(x)))
        return out


class Block(nn.Module):
    def __init__(self, width: int, capacity: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = Top2(width, (Expert(width) for _ in range(EXPERTS)), capacity=capacity)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.mlp(self.norm(x))
        return out


class Mixture(nn.Module):
    """A chain of mixtures. `cold` steers every token away from the last expert."""

    def __init__(self, width: int = 6, *, capacity: float = 4.0, cold: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, capacity) for _ in range(2))
        self.head = nn.Linear(width, VOCABULARY)
        if cold:
            for block in self.blocks:
                block.norm.bias.data[0] = 20.0
                block.mlp.gate.weight.data[-1] = 0.0
                block.mlp.gate.weight.data[-1, 0] = -9.0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(x)
        return logits


KINDS: dict[str, tuple[Callable[[], nn.Module], str, str, Any]] = {
    "own": (Mixture, "blocks", "blocks.*.mlp.experts", loss_fn),
    "tight": (partial(Mixture, capacity=0.5), "blocks", "blocks.*.mlp.experts", loss_fn),
    "cold": (partial(Mixture, cold=True), "blocks", "blocks.*.mlp.experts", loss_fn),
    "mixtral": (mixtral, "model.layers", "model.layers.*.mlp.experts", logits_loss),
}


def train(run: Run, *, kind: str, foreach: bool | None = None) -> tuple[list[float], list[str], list[str], str]:
    """Train a mixture with clipping; return the losses, this rank's experts, which of them moved, and the digest."""
    build, blocks, experts, loss = KINDS[kind]
    model = run.shard(build, blocks=blocks, experts=experts, seed=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=foreach)
    batches = run.batches(Sentences(), global_batch=8, micro_batch=2, seed=11)
    run.restore(model=model, optimizer=optimizer, batches=batches)
    mine = {name: parameter for name, parameter in model.named_parameters() if ".experts." in name}
    before = {name: local(parameter).clone() for name, parameter in mine.items()}
    losses = []
    for batch in batches.until(step=STEPS):
        made = run.backward(model, batch, loss)
        run.step(optimizer, loss=made, clip=0.5)
        losses.append(made.value)
    moved = [name for name, parameter in mine.items() if not torch.equal(local(parameter), before[name])]
    return losses, list(mine), moved, run.digest()


def trainer(kind: str, **options: Any) -> Callable[[Run], Any]:
    """Return a main that trains a mixture."""
    return partial(train, kind=kind, **options)

"""Mains that train on texts of several lengths, in micro-batches cut by a budget of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from elastic3d.data import Order, TokenBudget, check
from elastic3d.training import Run
from tests.parallel.mains import pad
from tests.parallel.models import VOCABULARY, Model, loss_fn

STEPS = 5
TOKENS = 24
TEXTS = 37


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What a run came to. counts: the number of micro-batches of each step."""

    digest: str
    losses: tuple[float, ...]
    counts: tuple[int, ...]
    whole: bool


class Texts:
    """Text i has between 2 and 12 tokens, and its labels are the same one token later."""

    lengths = tuple(2 + number * number % 11 for number in range(TEXTS))

    def __len__(self) -> int:
        return TEXTS

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        made = torch.Generator().manual_seed(index)
        tokens = torch.randint(0, VOCABULARY, (self.lengths[index],), generator=made).tolist()
        return {"tokens": tokens, "labels": [*tokens[1:], -100]}


def train(
    run: Run,
    *,
    steps: int = STEPS,
    budget: TokenBudget | None = None,
    leaf: int = 1,
    summed: bool = False,
    exclude: Any = (),
    build: type[Model] = Model,
) -> Trained:
    """Train the small model, with dropout, a schedule and clipping."""
    model = run.shard(build, blocks="blocks", seed=3, leaf=leaf)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
    batches = run.batches(
        Texts(),
        global_batch=16,
        micro_batch=budget or TokenBudget(TOKENS),
        seed=11,
        collate=pad,
        exclude=exclude,
    )
    run.restore(model=model, optimizer=optimizer, schedule=schedule, batches=batches)
    for batch in batches.until(step=steps):
        run.step(optimizer, schedule, loss=run.backward(model, batch, sums if summed else loss_fn), clip=0.5)
    order, records = batches.order, run._port.records  # type: ignore[attr-defined]
    return Trained(
        digest=run.digest(),
        losses=tuple(record.loss for record in records),
        counts=tuple(order.micro_batches_at(step) for step in range(steps)),
        whole=check(run.ledger, order).whole,
    )


def evaluate(run: Run) -> list[float]:
    """Evaluate texts of several lengths between the steps, in micro-batches of three; return the mean losses."""
    model = run.shard(Model, blocks="blocks", seed=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    budget = TokenBudget(TOKENS, multiple=2)
    batches = run.batches(Texts(), global_batch=16, micro_batch=budget, seed=11, collate=pad)
    run.restore(model=model, optimizer=optimizer, batches=batches)
    values = []
    for batch in batches.until(step=2):
        values.append(run.evaluate(model, Texts(), _of_each, micro_batch=3, collate=_filled))
        run.step(optimizer, loss=run.backward(model, batch, loss_fn))
    return values


def _filled(samples: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    longest = max(len(sample["tokens"]) for sample in samples)
    return {
        name: torch.tensor([sample[name] + [filler] * (longest - len(sample[name])) for sample in samples])
        for name, filler in (("tokens", 0), ("labels", -100))
    }


def _of_each(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    losses = nn.functional.cross_entropy(output.float().transpose(1, 2), target, reduction="none")
    return losses.sum(1), (target != -100).sum(1).float()


class Placed(Model):
    """Computes before its blocks with the places of tokens, and after its last module with what that returns."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Embedding(max(Texts.lengths), self.embed.embedding_dim)
        for name in ("blocks", "norm", "head"):
            # Registered last, as these run last.
            module = getattr(self, name)
            delattr(self, name)
            setattr(self, name, module)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)[None]
        x = self.drop(2 * self.embed(tokens) + self.places(places))
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x)) / 2
        return logits


class Cropping(Model):
    """Computes with no more than the first ten tokens of a text, which is a chain where none has more."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.embed(tokens))
        for block in self.blocks:
            x = block(x)[:, :10]
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def crop(run: Run) -> None:
    """Train a model that crops on texts of which none is long in the first step, and all are later."""
    first = set(Order(length=TEXTS, global_batch=16, micro_batch=1, seed=11).samples(0, 16).tolist())
    lengths = [number % 5 + 2 if number in first else 12 for number in range(TEXTS)]
    texts = [{"tokens": [1] * length, "labels": [2] * length} for length in lengths]
    model = run.shard(Cropping, blocks="blocks", seed=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    budget = TokenBudget(TOKENS, lengths=lengths, multiple=2)
    batches = run.batches(texts, global_batch=16, micro_batch=budget, seed=11, collate=pad)
    run.restore(model=model, optimizer=optimizer, batches=batches)
    for batch in batches.until(step=STEPS):
        run.step(optimizer, loss=run.backward(model, batch, loss_fn))


def sums(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum of the losses of all tokens that have a label, and their number."""
    total = nn.functional.cross_entropy(output.flatten(0, 1).float(), target.flatten(), reduction="sum")
    return total, (target != -100).sum()

"""Mains whose global batch follows the gradient's noise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from elastic3d.data import Adaptive, check
from elastic3d.data.collating import Collate
from elastic3d.data.holes import Holes
from elastic3d.parallel.leaf_squares import LeafPlaces
from elastic3d.training import Run
from tests.parallel.models import Model, Sentences, loss_fn

STEPS = 8
POLICY = Adaptive(8, 28, multiple=4, every=2, measured_every=1, memory=2, margin=0.05, learning_rate="adascale")


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What a run came to. sizes: the global batch of each step. noise: its scale after each that this generation made.

    changed: why lines of the ledger begin. rates: the learning rate of each update. holes: of its order.
    """

    digest: str
    sizes: tuple[int, ...]
    noise: tuple[float | None, ...]
    whole: bool
    changed: tuple[str, ...]
    rates: tuple[float, ...]
    holes: Holes


def train(
    run: Run,
    *,
    steps: int = STEPS,
    policy: Any = POLICY,
    leaf: int = 1,
    tokens: bool = False,
    clip: float | None = 0.5,
    precision: str = "fp32",
    tensor: Any = None,
    build: Any = Model,
    dataset: Any = None,
    collate: Collate | None = None,
    loss: Any = None,
    exclude: Any = (),
    blocks: str | None = "blocks",
    reduction: str = "ordered",
    workers: int = 0,
) -> Trained:
    """Train the small model with a schedule, and a batch that changes."""
    model = run.shard(build, blocks=blocks, seed=3, leaf=leaf, precision=precision, tensor=tensor, reduction=reduction)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
    batches = run.batches(
        dataset or Sentences(),
        global_batch=policy,
        micro_batch=2,
        seed=11,
        exclude=exclude,
        collate=collate,
        workers=workers,
    )
    run.restore(model=model, optimizer=optimizer, schedule=schedule, batches=batches)
    rates: list[float] = []
    optimizer.register_step_pre_hook(lambda one, *_: rates.append(one.param_groups[0]["lr"]))
    for batch in batches.until(step=steps):
        made = run.backward(model, batch, loss or (summed if tokens else loss_fn))
        run.step(optimizer, schedule, loss=made, clip=clip)
    order, records = batches.order, run._port.records  # type: ignore[attr-defined]
    return Trained(
        digest=run.digest(),
        sizes=tuple(order.batch_at(step) for step in range(steps)),
        noise=tuple(record.noise_scale for record in records),
        whole=check(run.ledger, order).whole,
        changed=tuple(line.changed for line in run.ledger),
        rates=tuple(rates),
        holes=order.holes,
    )


@dataclass(frozen=True, kw_only=True)
class Squared:
    """What a run came to, and the squared norm of each leaf in each vote that measured them, as hex text."""

    trained: Trained
    squares: tuple[tuple[str, ...], ...]


def train_squared(run: Run, **choices: Any) -> Squared:
    """Train as `train` does, and keep the squares that all ranks have put together."""
    squares: list[tuple[str, ...]] = []
    fold = LeafPlaces.fold

    def noted(places: LeafPlaces, row: torch.Tensor) -> tuple[float, ...]:
        folded = fold(places, row)
        squares.append(tuple(one.hex() for one in folded))
        return folded

    replace(LeafPlaces, "fold", noted)
    return Squared(trained=train(run, **choices), squares=tuple(squares))


def replace(owner: type, name: str, by: Callable[..., Any]) -> None:
    """Have the runtime call another function."""
    setattr(owner, name, by)


def summed(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return the sum of the losses of some tokens, and their number, which micro-batches differ in."""
    some = target % 3 > 0
    kept = torch.where(some, target, -100)
    total = nn.functional.cross_entropy(
        output.flatten(0, 1).float(), kept.flatten(), ignore_index=-100, reduction="sum"
    )
    return total, int(some.sum())

"""Mains of runs in which some numbers are not finite: of samples, wherever they are computed, or of a device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from elastic3d.data import check
from elastic3d.data.holes import Holes
from elastic3d.training import Run
from tests.data.streams import Stateful
from tests.parallel.models import Model, Sentences, loss_fn

STEPS = 4
LOSS, GRADIENT, HIGH = -1, -2, -3
"""Marks of samples whose loss is not finite, of those of which only the gradient is not, and of a high loss."""


class Poisoned(Sentences):
    """Sentences, of which some bring numbers that are not finite. marks: by number of the sample."""

    def __init__(self, marks: dict[int, int]) -> None:
        super().__init__()
        self.marks = marks

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, target = super().__getitem__(index)
        if index in self.marks:
            target = target.clone()
            target[0] = self.marks[index]
        return tokens, target


def poisoned_loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy, of marked samples not finite."""
    loss = loss_fn(logits, target.clamp(min=0))
    marks = set(target[:, 0].tolist())
    if LOSS in marks:
        return loss * torch.nan
    if GRADIENT in marks:
        # The square root of zero: its value is finite, its derivative is not.
        return loss + (logits * 0).float().sum().abs().sqrt()
    return loss * 10 if HIGH in marks else loss


@dataclass(frozen=True, kw_only=True)
class Sick:
    """A rank whose device brings out NaN in one of its blocks. passes: how many of them, from `step` on."""

    rank: int
    step: int = 1
    passes: int = 1


@dataclass(frozen=True, kw_only=True)
class Made:
    """What became of a run. account: (consumed, excluded) by its ledger, which is whole. holes: of its order.

    losses: those that are kept to compare others with.
    """

    digest: str
    account: tuple[int, int]
    holes: Holes
    skipped: tuple[bool, ...]
    losses: tuple[str, ...]


def train(
    run: Run,
    *,
    marks: Sequence[tuple[int, int]] = (),
    exclude: Holes = (),
    sick: Sequence[Sick] = (),
    leaf: int = 1,
    micro_batches: int = 6,
    stream: bool = False,
    clip: float | None = 0.5,
    precision: str = "fp32",
    steps: int = STEPS,
) -> Made:
    """Train the small model."""
    model = run.shard(lambda: Model(), blocks="blocks", seed=3, leaf=leaf, precision=precision)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data: Any = Stateful() if stream else Poisoned(dict(marks))
    batches = run.batches(data, global_batch=2 * micro_batches, micro_batch=2, seed=11, exclude=exclude)
    run.restore(model=model, optimizer=optimizer, batches=batches)
    made = [_Sickness(one, model) for one in sick if one.rank == run.rank]
    skipped = []
    for batch in batches.until(step=steps):
        for one in made:
            one.at(batch.step)
        loss = run.backward(model, batch, poisoned_loss)
        run.step(optimizer, loss=loss, clip=clip)
        skipped.append(loss.skipped)
    account = check(run.ledger, batches.order)
    assert account.whole, account
    consumed = account.consumed, account.excluded
    return Made(
        digest=run.digest(),
        account=consumed,
        holes=batches.order.holes,
        skipped=tuple(skipped),
        losses=run._health.facts.losses.losses if run._health.facts.losses is not None else (),
    )


class _Sickness:
    """Turns the output of this rank's first block into NaN, for some passes."""

    def __init__(self, sick: Sick, model: nn.Module) -> None:
        self._sick, self._due, self._passes = sick, False, 0
        block = next(iter(model.get_submodule("blocks").children()))
        block.register_forward_hook(lambda module, given, output: self._wrong(output))

    def at(self, step: int) -> None:
        """Be due from its step on."""
        self._due |= step >= self._sick.step

    def _wrong(self, tensor: torch.Tensor) -> torch.Tensor:
        if not self._due or self._passes >= self._sick.passes:
            return tensor
        self._passes += 1
        return tensor * torch.nan


class Many(Poisoned):
    """As many sentences, over and over, that no sample comes twice."""

    def __len__(self) -> int:
        return 2000

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, target = Sentences.__getitem__(self, index % super().__len__())
        if index in self.marks:
            target = target.clone()
            target[0] = self.marks[index]
        return tokens, target


def train_spiking(run: Run, *, first: int, steps: int) -> int:
    """Train with a loss that is high for three steps from `first` on; return how many steps were made."""
    model = run.shard(lambda: Model(), blocks="blocks", seed=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = Many({})
    batches = run.batches(data, global_batch=12, micro_batch=2, seed=11)
    start, stop = batches.order.positions(first, first + 3)
    data.marks = dict.fromkeys(map(int, batches.order.samples(start, stop)), HIGH)
    run.restore(model=model, optimizer=optimizer, batches=batches)
    for batch in batches.until(step=steps):
        run.step(optimizer, loss=run.backward(model, batch, poisoned_loss), clip=0.5)
    return run.steps

"""The size of a run's global batch, where the run chooses it: measured in a step, decided after it, and told.

Everything that is decided follows from votes and from the state alone (`data/noise`), so that it is the same on every
rank, and in a step that is made again. A change is in the order that each state has from then on, and its reason in
the ledger, with the step before which it was decided in `NoiseScale`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.optim import Optimizer

from elastic3d.data import Adaptive, Batches
from elastic3d.data.noise import NoiseScale, StepSquares, decided, rate_factor
from elastic3d.errors import UsageError
from elastic3d.parallel.numerics.update import Update
from elastic3d.parallel.vote import Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Resized:
    """What a step has shown. why: the batch is another one from the next step on, "" if not. scale: of the noise."""

    why: str = ""
    scale: float | None = None


class BatchControl:
    """Chooses the global batch of one run on one rank; nothing at all where that is fixed."""

    def __init__(self, batches: Batches | None = None, leaf: int = 1) -> None:
        self._batches, self._leaf = batches, leaf
        self._noise = NoiseScale()

    @property
    def _policy(self) -> Adaptive | None:
        return None if self._batches is None else self._batches.order.adaptive

    def check(self, optimizer: Optimizer) -> None:
        """Refuse an optimizer whose learning rates cannot be multiplied; UsageError."""
        policy = self._policy
        if policy is None or policy.learning_rate is None:
            return
        for number, group in enumerate(optimizer.param_groups):
            if not isinstance(group.get("lr"), float | int | torch.Tensor):
                raise UsageError(
                    f'run.restore: Adaptive(learning_rate="{policy.learning_rate}") multiplies learning rates, and '
                    f"group {number} of {type(optimizer).__name__} has lr={group.get('lr')!r}; give it a number, or "
                    "choose learning_rate=None"
                )

    def resume(self, saved: NoiseScale | None) -> str:
        """Go on from a state's noise scale; return why its next step has another size than its last, "" if it has not.

        A size that the state had before the script allowed others is changed at once, and that is no decision.
        """
        if self._policy is None or self._batches is None:
            return ""
        self._noise = saved or NoiseScale()
        order, step = self._batches.order, self._batches.step
        if not step or order.batch_at(step) == order.batch_at(step - 1):
            return ""
        if self._noise.changed == step and self._noise.why:
            return self._noise.why
        why = f"the global batch is {order.batch_at(step)} after {order.batch_at(step - 1)}: the script says so"
        self._noise = replace(self._noise, changed=step, why=why)
        return why

    @property
    def noise(self) -> NoiseScale | None:
        """What belongs to the state; None where the batch is fixed."""
        return self._noise if self._policy is not None else None

    def measures(self, step: int) -> bool:
        """Return whether the squares of a step's leaves are measured."""
        policy = self._policy
        return policy is not None and step % policy.measured_every == 0

    @contextmanager
    def rates(self, optimizer: Optimizer) -> Iterator[None]:
        """Have the optimizer's learning rates be those of the present size; afterwards they are the script's again."""
        policy, batches = self._policy, self._batches
        factor = 1.0 if policy is None or batches is None else rate_factor(policy, self._noise, batches.global_batch)
        if factor == 1.0:
            yield
            return
        before: list[Any] = [group["lr"] for group in optimizer.param_groups]
        try:
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * factor
            yield
        finally:
            for group, rate in zip(optimizer.param_groups, before, strict=True):
                group["lr"] = rate

    def settle(self, outcome: Outcome, change: Update, scale: float) -> Resized:
        """Take what a step that was made has shown, and have `batches` change from the next one on if it is time.

        To be called when `batches` have counted the step. scale: by which its losses were multiplied.
        """
        policy, batches = self._policy, self._batches
        if policy is None or batches is None:
            return Resized()
        made, order = batches.step - 1, batches.order
        if outcome.leaf_squares and not change.skipped and change.norm is not None and math.isfinite(change.norm):
            self._noise = self._noise.after(self._shown(outcome, change.norm, scale), policy.memory)
        size = order.batch_at(made)
        chosen = decided(policy, self._noise, size, batches.step)
        if chosen is None:
            return Resized(scale=self._noise.samples)
        self._noise = replace(self._noise, changed=chosen.step, why=chosen.why)
        batches.resize(chosen.step, chosen.size)
        return Resized(why=chosen.why, scale=self._noise.samples)

    def _shown(self, outcome: Outcome, norm: float, scale: float) -> StepSquares:
        """Return what counts of a step's leaves, without the scale of its losses."""
        assert self._batches is not None
        order, made = self._batches.order, self._batches.step - 1
        excluded = {number // self._leaf for number in order.excluded(made)}
        leaves = [leaf for leaf in range(len(outcome.leaf_squares)) if leaf not in excluded]
        counts = outcome.micro_tokens
        return StepSquares(
            samples=len(leaves) * self._leaf * order.micro_batch,
            leaves=[outcome.leaf_squares[leaf] / (scale * scale) for leaf in leaves],
            norm=norm,
            tokens=[sum(counts[leaf * self._leaf : (leaf + 1) * self._leaf]) for leaf in leaves] if counts else (),
        )

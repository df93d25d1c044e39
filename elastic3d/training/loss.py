"""The loss of a step, as a user sees it.

What a step's loss is, no rank knows before all have voted in `run.step`: with several replicas each has a part of it,
and only the last pipeline stage has any. A number that is asked for before is that of the step before, which every rank
knows, in every layout and after every restart; the script is told so, once for each line that asks.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, NoReturn

import torch

from elastic3d.data import Batch
from elastic3d.errors import UsageError

if TYPE_CHECKING:
    from elastic3d.parallel.pipeline.passes import LossFunction


class EarlyLoss(UserWarning):
    """The loss of a step was read before `run.step`: what was read is that of the step before."""


class Loss:
    """The loss of one step: known to all ranks once `run.step` has taken it.

    before: the loss of the step before, NaN where the run has made none. It is what `item()`, `float()` and formatting
    give until `run.step` has taken this one, with a warning; it costs nothing, waits for nobody, and is the same on
    every rank. `value` never gives it.
    """

    def __init__(
        self,
        parts: Mapping[int, torch.Tensor],
        batch: Batch,
        *,
        passed: LossFunction | None = None,
        before: float = math.nan,
    ) -> None:
        self._parts, self._batch, self._before = parts, batch, before
        self.passed = passed
        """The loss function that the passes were given, to make them again; None where nobody may."""
        self._value: float | None = None
        self._skipped = False

    @property
    def value(self) -> float:
        """The mean over the global batch, or over its tokens. UsageError before `run.step`."""
        if self._value is None:
            raise UsageError("the loss of a step is known after run.step(..., loss=loss); read it then")
        return self._value

    @property
    def batch(self) -> Batch:
        """The batch of this loss."""
        return self._batch

    @property
    def parts(self) -> Mapping[int, torch.Tensor]:
        """This rank's losses by the number of their micro-batch: a mean, or a sum over tokens and their number."""
        return self._parts

    @property
    def skipped(self) -> bool:
        """Whether `run.step` skipped the update."""
        return self._skipped

    def item(self) -> float:
        """Return the loss as a number; before `run.step` that of the step before, with a warning."""
        return self._known()

    def detach(self) -> Loss:
        """Return this loss, which no graph hangs on."""
        return self

    def cpu(self) -> Loss:
        """Return this loss, which is on no device."""
        return self

    def backward(self) -> NoReturn:
        """Raise UsageError: `run.backward` has made the backward pass."""
        raise UsageError("run.backward has made the backward pass already; leave loss.backward() out")

    def remade(self, parts: Mapping[int, torch.Tensor], batch: Batch) -> None:
        """Take the losses of passes that were made again, of the same step."""
        self._parts, self._batch = parts, batch

    def settle(self, value: float, *, skipped: bool) -> None:
        """Take the vote's outcome."""
        self._value, self._skipped = value, skipped

    def __repr__(self) -> str:
        if self._value is not None:
            return f"Loss({self._value!r})"
        known = "" if math.isnan(self._before) else f"; {self._before!r} in the step before"
        return f"Loss(known after run.step{known})"

    def __str__(self) -> str:
        return repr(self) if self._value is None else str(self._value)

    def __float__(self) -> float:
        return self._known()

    def __format__(self, spec: str) -> str:
        return format(self._known(), spec) if spec else str(self)

    def _known(self) -> float:
        if self._value is not None:
            return self._value
        warnings.warn(
            f"the loss of step {self._batch.step} was read before run.step, which finds it: this is "
            f"{'NaN, since no step was made before' if math.isnan(self._before) else 'the loss of the step before'}; "
            "read it after run.step(..., loss=loss)",
            EarlyLoss,
            stacklevel=3,
        )
        return self._before

"""The loss of a step, as a user sees it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from elastic3d.data import Batch
from elastic3d.errors import UsageError

if TYPE_CHECKING:
    from elastic3d.parallel.pipeline.passes import LossFunction


class Loss:
    """The loss of one step: known to all ranks once `run.step` has taken it."""

    def __init__(self, parts: Mapping[int, torch.Tensor], batch: Batch, *, passed: LossFunction | None = None) -> None:
        self._parts, self._batch = parts, batch
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

    def remade(self, parts: Mapping[int, torch.Tensor], batch: Batch) -> None:
        """Take the losses of passes that were made again, of the same step."""
        self._parts, self._batch = parts, batch

    def settle(self, value: float, *, skipped: bool) -> None:
        """Take the vote's outcome."""
        self._value, self._skipped = value, skipped

    def __repr__(self) -> str:
        return "Loss(known after run.step)" if self._value is None else f"Loss({self._value!r})"

    def __str__(self) -> str:
        return repr(self) if self._value is None else str(self._value)

    def __float__(self) -> float:
        return self.value

    def __format__(self, spec: str) -> str:
        return format(self.value, spec)

"""The gradient between `run.backward` and `run.step`, which the script neither uses up nor takes away.

It is neither clipped nor divided yet. An `optimizer.step()` left in the loop would make a second update of it, and an
`optimizer.zero_grad()` would leave the step without one, both in silence.
"""

from __future__ import annotations

from typing import Any, NoReturn

from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from elastic3d.errors import UsageError


class UnclippedGradient:
    """See the module. No hook is left in `run.step`, where somebody else's would be in the way of `local_step`."""

    def __init__(self) -> None:
        self._handle: RemovableHandle | None = None
        self._there = False

    def hold(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Have the optimizer refuse the script's own steps, and note whether the model has gradients here."""
        if self._handle is None:
            self._handle = optimizer.register_step_pre_hook(_refuse)
        self._there = _has_gradient(model)

    def release(self, model: nn.Module) -> None:
        """Let the optimizer step again; UsageError if all gradients are gone."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
        if self._there and not _has_gradient(model):
            raise UsageError(
                "run.step: the gradients that run.backward left were zeroed before it, so that nothing would be "
                "learned. Leave out the zero_grad() of optimizer or model: run.step zeroes them after the update"
            )


def _has_gradient(model: nn.Module) -> bool:
    return any(parameter.grad is not None for parameter in model.parameters())


def _refuse(optimizer: Optimizer, *_: Any) -> NoReturn:
    raise UsageError(
        f"{type(optimizer).__name__}.step() was called between run.backward and run.step: it would make an update of "
        "its own, of a gradient that is not clipped yet. Leave it out: run.step makes the optimizer's step"
    )

"""The gradient between `run.backward` and `run.step`, which the script neither uses up nor takes away.

It is neither clipped nor divided yet. An `optimizer.step()` left in the loop would make a second update of it, and an
`optimizer.zero_grad()` would leave the step without one, or with one of zeros, both in silence.

The optimizer's own calls are refused where they are made: a `foreach` or `fused` one zeroes distributed gradients
without a trace, since torch counts no such write to them. One of the model is noticed in `run.step`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NoReturn

import torch
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from elastic3d.errors import UsageError
from elastic3d.parallel.state import local


class UnclippedGradient:
    """See the module. No hook is left in `run.step`, where somebody else's would be in the way of `local_step`."""

    def __init__(self) -> None:
        self._handle: RemovableHandle | None = None
        self._zero_grad: Callable[..., None] | None = None
        self._version: int | None = None

    def hold(self, optimizer: Optimizer) -> None:
        """Have the optimizer refuse the script's own calls, and note whether it has gradients here."""
        if self._handle is None:
            self._handle = optimizer.register_step_pre_hook(_refuse_step)
            self._zero_grad = vars(optimizer).get("zero_grad")
            optimizer.zero_grad = partial(_refuse_zeros, optimizer)  # type: ignore[method-assign]
        first = next(_gradients(optimizer), None)
        self._version = None if first is None else first._version

    def release(self, optimizer: Optimizer) -> None:
        """Let the optimizer work again; UsageError if all its gradients are gone, or were written over with zeros."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
            del optimizer.zero_grad
            if self._zero_grad is not None:
                optimizer.zero_grad = self._zero_grad  # type: ignore[method-assign]
        if self._version is None:
            return
        first = next(_gradients(optimizer), None)
        # A device is only asked for numbers where somebody has written to them.
        if first is None or (
            first._version != self._version and not any(bool(local(one).any()) for one in _gradients(optimizer))
        ):
            raise UsageError(
                "run.step: the gradients that run.backward left were zeroed before it, so that nothing would be "
                "learned. Leave out what zeroes them, such as model.zero_grad(): run.step does after the update"
            )


def _gradients(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    return (parameter.grad for parameter in parameters if parameter.grad is not None)


def _refuse_step(optimizer: Optimizer, *_: Any) -> NoReturn:
    raise UsageError(
        f"{type(optimizer).__name__}.step() was called between run.backward and run.step: it would make an update of "
        "its own, of a gradient that is not clipped yet. Leave it out: run.step makes the optimizer's step"
    )


def _refuse_zeros(optimizer: Optimizer, *_: Any, **__: Any) -> NoReturn:
    raise UsageError(
        f"{type(optimizer).__name__}.zero_grad() was called between run.backward and run.step: nothing would be "
        "learned. Leave it out: run.step zeroes the gradients after the update"
    )

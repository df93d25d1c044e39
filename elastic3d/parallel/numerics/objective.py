"""What the user's loss function means for a step: a mean per micro-batch, or sums and counts of tokens.

- A number is the mean loss of a micro-batch, and the step's gradient is that of the mean over its micro-batches, each
  weighed by its number of samples. Where lengths vary, a mean over tokens gives those of short micro-batches more
  weight.
- A pair (sum, count) is a sum over the tokens of a micro-batch and their number. The step's gradient is that of
  the sum over the global batch divided by its number of tokens, whatever the layout and the micro-batches. The number
  is an int, or a tensor of an integer dtype: many loss functions return (loss, accuracy), which is no such pair.

The step vote knows the total. Sums are therefore differentiated as they are, and the gradient is divided once,
elementwise, before it is clipped: there is no further collective, and nothing depends on the layout. In fp16 sums of
many tokens may overflow where a mean would not; the loss scale then comes down, below one if need be, at the cost of
the first few steps.
"""

from __future__ import annotations

from collections.abc import Callable
from numbers import Integral
from typing import Any

import torch

from elastic3d.errors import UsageError

UserLoss = Callable[[Any, Any], torch.Tensor | tuple[torch.Tensor, torch.Tensor | int]]


def objective(loss_fn: UserLoss, scale: float) -> Callable[[Any, Any], torch.Tensor]:
    """Return a loss function for the passes: a number, or the two numbers (sum, count); gradients come back scaled."""

    def scored(output: Any, target: Any) -> torch.Tensor:
        value = loss_fn(output, target)
        if isinstance(value, torch.Tensor):
            if value.dim():
                raise UsageError(
                    f"the loss function returned a tensor of shape {tuple(value.shape)}; it must be one number, the "
                    "mean over the micro-batch, or a pair (sum over its tokens, number of tokens)"
                )
            return _scaled(value, scale)
        if not isinstance(value, tuple) or len(value) != 2:
            raise UsageError(
                f"the loss function returned {type(value).__name__}; it must be one tensor, the mean over the "
                "micro-batch, or a pair (sum over its tokens, number of tokens)"
            )
        total, count = value
        if not _is_number(total) or not _is_count(count):
            raise UsageError(
                f"the loss function returned a pair of {_said(total)} and {_said(count)}. A pair is (sum over the "
                "tokens of the micro-batch, number of tokens): two numbers, the second an int or a tensor of an "
                "integer dtype, such as mask.sum().long(). If it is a metric, such as an accuracy, return the mean "
                "loss alone, and give the metric to run.log"
            )
        if not isinstance(count, torch.Tensor):
            # By a kernel: a copy of a number of the host's waits for the device.
            count = torch.full((), count, dtype=torch.float64, device=total.device)
        return torch.stack([_scaled(total, scale).double(), count.to(total.device).double()])

    return scored


def weighed(loss: torch.Tensor, divisor: float) -> torch.Tensor:
    """Return what to differentiate, from the result of `objective`: a sum as it is, a mean divided by `divisor`."""
    return loss[0] if loss.dim() else loss / divisor


def _is_number(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not value.dim()


def _is_count(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return not value.dim() and not (value.is_floating_point() or value.is_complex() or value.dtype == torch.bool)
    return isinstance(value, Integral) and not isinstance(value, bool)


def _said(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)} and {value.dtype}"
    return type(value).__name__


def _scaled(loss: torch.Tensor, scale: float) -> torch.Tensor:
    if scale == 1.0:
        return loss
    # This is not done in fp16, in which the scale itself would overflow.
    scaled: torch.Tensor = _Scale.apply(loss.float(), scale)  # type: ignore[no-untyped-call]
    return scaled


class _Scale(torch.autograd.Function):
    """Passes a loss on as it is, and its gradient back scaled."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.scale = scale
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient * ctx.scale, None

"""Derives the update from a step's vote: what to multiply the summed gradient by, or that the step is skipped.

A pure function of what every rank knows, so that every rank does the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from elastic3d.parallel import norms
from elastic3d.parallel.norms import clip_coefficient
from elastic3d.parallel.state import local
from elastic3d.parallel.vote import Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """factor: of every gradient. norm: of the step's true gradient, before clipping. skipped: no update is made.

    finite: the loss scale was not too large.
    """

    factor: float
    norm: float | None
    finite: bool
    skipped: bool


def update(outcome: Outcome, *, clip: float | None, scale: float, skip: bool) -> Update:
    """Return what to do with the gradient. scale: of the losses. skip: skip an update that is not finite.

    A step without a single token, or without a micro-batch that counts, has nothing to learn from, and is skipped.
    """
    divisor = scale * (1.0 if outcome.tokens is None else outcome.tokens)
    if not divisor or outcome.empty:
        return Update(factor=1.0, norm=None, finite=True, skipped=True)
    norm = None if outcome.norm is None else outcome.norm / divisor
    if skip and not outcome.finite:
        return Update(factor=1.0, norm=norm, finite=False, skipped=True)
    factor = 1.0 if clip is None or norm is None else clip_coefficient(norm, clip)
    return Update(factor=factor / divisor, norm=norm, finite=outcome.finite, skipped=False)


def scale_gradients(model: nn.Module, outcome: Outcome, change: Update) -> None:
    """Make the gradients those of the update; of what got none anywhere, take away what reduction left."""
    parameters = dict(model.named_parameters())
    for name in outcome.absent:
        if name in parameters:
            parameters[name].grad = None
    norms.scale([local(p.grad) for p in parameters.values() if p.grad is not None], change.factor)


def finite(model: nn.Module) -> list[torch.Tensor]:
    """Return for each of this rank's gradients whether it is finite; if they are clipped, their norm shows that.

    They are where the gradients are: whoever reads one waits for the device.
    """
    gradients = (local(parameter.grad) for parameter in model.parameters() if parameter.grad is not None)
    return [torch.isfinite(gradient).all() for gradient in gradients]

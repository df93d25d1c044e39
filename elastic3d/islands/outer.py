"""The outer optimizer: SGD with Nesterov momentum over the mean of the islands' deltas, on one rank's part.

Every operation rounds once and works on each element by itself, so that the bits do not depend on how parameters are
cut: `a + b * c` in one call might round once or twice, by where in memory an element lies, and is not used.

DiLoCo (arXiv:2311.08105): with the outer gradient g, the mean of the deltas (outer parameters minus the island's),

    momentum = mu * momentum + g;  parameters = parameters - lr * (g + mu * momentum)

as torch.optim.SGD(nesterov=True) has it. With lr 1 and mu 0 the result is the mean of the islands' parameters.
"""

from __future__ import annotations

import torch


def add_up(total: torch.Tensor | None, delta: torch.Tensor) -> torch.Tensor:
    """Return the sum of a delta and those before it, in place where there are some."""
    return delta.clone() if total is None else total.add_(delta)


def outer_step(
    anchor: torch.Tensor, momentum: torch.Tensor | None, total: torch.Tensor, count: int, *, lr: float, mu: float
) -> None:
    """Move outer parameters, and their momentum where there is one, in place.

    anchor: the outer parameters. total: the sum of `count` deltas, which is overwritten.
    """
    gradient = total.div_(count)
    if momentum is not None:
        momentum.mul_(mu).add_(gradient)
        gradient.add_(momentum * mu)
    anchor.sub_(gradient.mul_(lr))

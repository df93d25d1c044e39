"""Turns `run.shard(..., tensor=...)` into a scheme that fits the model and the layout, or says why there is none."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from elastic3d.errors import LayoutError, UsageError
from elastic3d.parallel.tensor.adapters import place_of_layer, within_adapters
from elastic3d.parallel.tensor.foreign import own_plan
from elastic3d.parallel.tensor.styles import Scheme, scheme_of

AUTO = "auto"

Tensor = Mapping[str, str] | str | None
"""Patterns of module names and their styles; "auto" for the plan that comes with the model; None for no plan."""


def take(model: nn.Module, tensor: Tensor, tp: int) -> Scheme | None:
    """Return the scheme of the whole model, real or on meta; None without a plan.

    UsageError, ModelError or LayoutError, naming what does not fit, for a plan that the model or tp cannot follow.
    """
    if tensor is None:
        if tp > 1:
            raise LayoutError(
                f"tp={tp} needs to know how layers are cut: give run.shard a tensor= plan, or the layout tp=1"
            )
        return None
    if isinstance(tensor, str) and tensor != AUTO:
        raise UsageError(f'run.shard: tensor must be a mapping of module names to styles, or "auto"; it is {tensor!r}')
    plan = own_plan(model) if isinstance(tensor, str) else tensor
    scheme = scheme_of(model, within_adapters(model, plan), place_of_layer)
    scheme.check(tp)
    return scheme

"""Refuses models and optimizers that cannot be trained, or not with equal bits, when they are taken."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import torch
from torch import nn

from elastic3d.errors import ModelError, UsageError

MIXES_MICRO_BATCHES = (nn.modules.batchnorm._BatchNorm,)


class OutsidePromise(UserWarning):
    """A part of the model trains, but not with the same bits for every layout."""


def look_at_model(model: nn.Module, units: Iterable[tuple[str, nn.Module]]) -> None:
    """Refuse what FSDP cannot shard in any layout, and warn of modules that keep state across micro-batches.

    units: the blocks by name; everything else makes one more unit, the model itself.
    """
    for name, module in model.named_modules():
        if isinstance(module, MIXES_MICRO_BATCHES):
            warnings.warn(
                f"module {name!r} ({type(module).__name__}) keeps statistics over micro-batches: its results depend on "
                "the layout, and so do the bits from here on; GroupNorm and LayerNorm keep the promise",
                OutsidePromise,
                stacklevel=2,
            )
    inside: dict[int, str] = {}
    for unit, block in units:
        inside.update({id(parameter): unit for parameter in block.parameters()})
    dtypes: dict[str, dict[torch.dtype, str]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.dim():
            raise ModelError(
                f"parameter {name!r} has no dims, and a number cannot be cut; give it the shape (1,) instead"
            )
        if parameter.requires_grad:
            seen = dtypes.setdefault(inside.get(id(parameter), ""), {})
            seen.setdefault(parameter.dtype, name)
            if len(seen) > 1:
                (one, first), (other, second) = list(seen.items())[:2]
                raise ModelError(
                    f"parameters {first!r} ({one}) and {second!r} ({other}) are reduced together and need one dtype; "
                    "convert one of them, or run it under autocast instead"
                )


def look_at_parameters(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer over parameters that are not the model's: it would train nothing."""
    known = {id(parameter) for parameter in model.parameters()}
    given = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    strange = sum(id(parameter) not in known for parameter in given)
    if strange:
        raise UsageError(
            f"{strange} of the {len(given)} parameters of this {type(optimizer).__name__} are not those of the model "
            "that run.shard returned, so that they would not be trained. Trying again does not help: make the "
            "optimizer after run.shard, of the parameters of what it returns"
        )


def look_at_optimizer(optimizer: torch.optim.Optimizer, *, ordered: bool) -> None:
    """Refuse fused optimizers, whose kernels give other bits for other shards."""
    if ordered and any(group.get("fused") for group in optimizer.param_groups):
        raise UsageError(
            f"{type(optimizer).__name__}(fused=True) does not give the same bits for every layout; leave fused out, "
            'or choose run.shard(..., reduction="fast"), which does not promise them'
        )

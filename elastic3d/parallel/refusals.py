"""Refuses models and optimizers that cannot be trained, or not with equal bits, when they are taken."""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from elastic3d.errors import ModelError, UsageError

MIXES_MICRO_BATCHES = (nn.modules.batchnorm._BatchNorm,)

FOREIGN_KERNELS = ("flash_attn", "flash_attn_interface", "xformers", "transformer_engine", "apex")
"""Packages whose kernels do not follow `torch.use_deterministic_algorithms`: backward passes add up in any order."""


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


def look_at_kernels(model: nn.Module) -> None:
    """Warn of what makes a device compute other bits each time, beyond what torch itself prevents."""
    for name, module in model.named_modules():
        package = type(module).__module__.partition(".")[0]
        attention = str(getattr(getattr(module, "config", None), "_attn_implementation", None) or "")
        if package in FOREIGN_KERNELS or attention.startswith("flash"):
            what = f"{type(module).__name__} of {package}" if package in FOREIGN_KERNELS else f"attention {attention!r}"
            _warn(
                f"module {name!r} ({what}) computes by kernels of its own, which may add up in any order; "
                'torch\'s scaled_dot_product_attention ("sdpa") keeps the promise'
            )
            break
    if torch.backends.cudnn.benchmark:
        _warn(
            "torch.backends.cudnn.benchmark chooses convolutions by how fast they happen to run, so that the "
            "bits differ from run to run; leave it off"
        )
    inductor = sys.modules.get("torch._inductor.config")
    if inductor is not None and getattr(inductor, "max_autotune", False):
        _warn(
            "torch.compile's max_autotune chooses kernels by how fast they happen to run, so that the bits differ from "
            "run to run; leave it off"
        )


def _warn(text: str) -> None:
    warnings.warn(text, OutsidePromise, stacklevel=3)


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


def look_at_schedule(schedule: Any) -> None:
    """Refuse a schedule that `run.step` cannot step, since it wants a number that only the script has."""
    try:
        inspect.signature(schedule.step).bind()
    except TypeError as error:
        raise UsageError(
            f"run.step calls schedule.step(), and that of {type(schedule).__name__} takes more ({error}). Keep it as "
            'extra={"schedule": schedule} of run.restore, without schedule=, and call its step after run.step, the '
            "same on every rank"
        ) from error


def look_at_optimizer(optimizer: torch.optim.Optimizer, *, ordered: bool) -> None:
    """Refuse fused optimizers on the CPU, whose vectors give other bits than the rest of a shard.

    On a GPU each number is computed by one thread, alike in whole tensors and in slices of them (measured by
    `python -m chaos.gpu --stages P5,P6`).
    """
    fused = [group for group in optimizer.param_groups if group.get("fused")]
    if ordered and any(parameter.device.type == "cpu" for group in fused for parameter in group["params"]):
        raise UsageError(
            f"{type(optimizer).__name__}(fused=True) does not give the same bits for every layout on a CPU; leave it "
            'out, or choose run.shard(..., reduction="fast"), which does not promise them'
        )

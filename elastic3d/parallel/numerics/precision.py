"""The dtype that a step computes in, over fp32 state.

Parameters and optimizer state stay fp32 whatever the precision, so that a checkpoint does not depend on it; those of a
model that comes in 16 bits, as many pretrained ones do, are widened when it is built. FSDP2 casts
a unit's parameters when it gathers them, and floating-point arguments where they enter the model and each block. A
micro-batch's gradient arrives in the compute dtype and is cast to fp32 before it is summed. With one replica the model
is sharded over a mesh of one rank, so that the same casts are made in the same places: FSDP2 then gathers and reduces
by copying, and adds micro-batch after micro-batch in fp32, which is the order of the ordered reduction.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from enum import StrEnum
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils._pytree import tree_map

from elastic3d.errors import ModelError


class Precision(StrEnum):
    """The dtype of forward and backward passes. FP32: whatever the model was built with, without casts."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"

    @property
    def dtype(self) -> torch.dtype | None:
        """The compute dtype; None for the model's own."""
        return {Precision.BF16: torch.bfloat16, Precision.FP16: torch.float16}.get(self)

    @property
    def policy(self) -> MixedPrecisionPolicy:
        """FSDP2's policy for it. Outputs keep the compute dtype: a loss that needs fp32 casts them itself."""
        return MixedPrecisionPolicy(param_dtype=self.dtype, reduce_dtype=torch.float32 if self.dtype else None)


WIDENED = (torch.bfloat16, torch.float16)
"""Dtypes of parameters whose values fp32 holds exactly, as pretrained models come in them."""


def over_masters(build: Callable[[], nn.Module], precision: Precision) -> Callable[[], nn.Module]:
    """Return `build`, but with parameters in 16 bits widened to the fp32 masters that `precision` computes over.

    Each keeps its value, its identity and with it its ties. Buffers stay as they are: nothing casts them later, either.
    """
    if precision.dtype is None:
        return build

    @functools.wraps(build)
    def built() -> nn.Module:
        model = build()
        for parameter in model.parameters() if isinstance(model, nn.Module) else ():
            if parameter.dtype in WIDENED:
                parameter.data = parameter.data.float()
        return model

    return built


def check_masters(model: nn.Module, precision: Precision) -> None:
    """Refuse by name parameters that are not fp32 masters; without casts any dtype will do."""
    if precision.dtype is None:
        return
    for name, parameter in model.named_parameters():
        if parameter.dtype != torch.float32:
            raise ModelError(
                f"parameter {name!r} is {parameter.dtype}; precision={precision.value!r} computes over parameters that "
                "are kept in fp32, to which only 16 bits are widened. Build the model in fp32, or leave "
                'precision="fp32" to train it as it is built'
            )


def as_computed(model: nn.Module, blocks: Iterable[nn.Module], precision: Precision) -> nn.Module:
    """Return an outline that computes as it will under FSDP2: parameters cast, arguments cast inside each block.

    The casts are inside `forward`, so that hooks see the arguments that were passed to the block.
    """
    if precision.dtype is None:
        return model
    for parameter in model.parameters():
        parameter.data = parameter.data.to(precision.dtype)
    for block in blocks:
        block.forward = functools.partial(_with_casts, block.forward, precision.dtype)
    return model


def cast(values: Any, precision: Precision) -> Any:
    """Return values with all floating-point tensors in the compute dtype."""
    return values if precision.dtype is None else tree_map(functools.partial(_cast, precision.dtype), values)


def _with_casts(forward: Any, dtype: torch.dtype, *args: Any, **kwargs: Any) -> Any:
    args, kwargs = tree_map(functools.partial(_cast, dtype), (args, kwargs))
    return forward(*args, **kwargs)


def _cast(dtype: torch.dtype, value: Any) -> Any:
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

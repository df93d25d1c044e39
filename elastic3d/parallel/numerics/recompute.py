"""Which activations a block keeps for its backward pass, and which it computes again.

A block is recomputed whole (Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost") or in part: with
selective recomputation the results of matrix products with weights and of fused attention are kept, and all else is
computed again, above all the scores of plain attention (Korthikanti et al. 2022, "Reducing Activation Recomputation in
Large Transformer Models").

This happens inside the block's own `forward`. No module is wrapped, so that names do not change, and the block's hooks
stay outside: the keyed seeds, and FSDP's gathering and casts. torch restores the state of its random numbers before it
recomputes; here the same is done for those of Python and numpy, where the model draws from them. The operations and
their values are the same, so that the bits are those of a run that kept everything.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from enum import StrEnum
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from elastic3d.errors import ModelError
from elastic3d.global_random import Repeated
from elastic3d.parallel.randomness import Randomness

aten = torch.ops.aten
PRODUCTS = {aten.mm.default, aten.addmm.default}
ATTENTIONS = {
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
}


class Recompute(StrEnum):
    """How much of each block is computed again in its backward pass."""

    NONE = "none"
    SELECTIVE = "selective"
    FULL = "full"


def recompute(blocks: Iterable[tuple[str, nn.Module]], choice: Recompute, randomness: Randomness) -> None:
    """Let each block's `forward` keep only what `choice` says. Call it before FSDP and after tensor parallelism.

    blocks: by name. ModelError for one that is compiled in place, and would be computed again as torch compiles that:
    with other random numbers, or in a process's first step alone as it is written.
    """
    if choice is Recompute.NONE:
        return
    options: dict[str, Any] = {"use_reentrant": False}
    if choice is Recompute.SELECTIVE:
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _policy)
    for name, block in blocks:
        if block._compiled_call_impl is not None:
            raise ModelError(
                f"block {name!r} is compiled in place, with what recompute={choice.value!r} makes of it, and would not "
                "have the same bits. Leave recompute= out; or, for recompute='full', decorate its forward with "
                "@torch.compile in place of block.compile()"
            )
        block.forward = functools.partial(_checkpointed, block, block.forward, options, randomness)


def _checkpointed(
    block: nn.Module, forward: Any, options: dict[str, Any], randomness: Randomness, *args: Any, **kwargs: Any
) -> Any:
    if not block.training:
        return forward(*args, **kwargs)
    forward = functools.partial(forward, **kwargs)
    if randomness.keys_globals:
        forward = Repeated(forward)
    return checkpoint(forward, *args, **options)


def _policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if operation in PRODUCTS or (operation in ATTENTIONS and not _draws(operation, args, kwargs)):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def _draws(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether this call draws random numbers: if the second pass left it out, later ones would differ."""
    places = [argument.name for argument in operation._schema.arguments]
    given = dict(zip(places, args, strict=False)) | kwargs
    return bool(given.get("dropout_p"))

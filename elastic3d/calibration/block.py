"""One block of a user's model, with real weights on a real device: how long it takes and how many bytes it keeps.

The block's arguments are observed in a pass over the outline of the model on meta, and made up in the same shapes.
Weights are made up too: small normal numbers, whose values do not change how long products take.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves, tree_map

from elastic3d.calibration.record import BlockTimes
from elastic3d.clock import SYSTEM
from elastic3d.errors import ModelError
from elastic3d.parallel import initial
from elastic3d.parallel.constants import Constants
from elastic3d.parallel.foreign import Caller
from elastic3d.parallel.pipeline.stages import find_blocks
from elastic3d.parallel.shard_request import ShardRequest
from elastic3d.values import ModelProfile

WARM = 2
LEAST, MOST = 3, 200


class _Seen(Exception):
    """Ends a pass over an outline when the block has been called."""


def time_block(plan: ShardRequest, profile: ModelProfile, example: Any, *, device: str, seconds: float) -> BlockTimes:
    """Run a model's first block forward and back for about `seconds`, and return how long it takes.

    A model without blocks is timed whole. ModelError if it does not run with made-up values.
    """
    place = torch.device(device)
    dtype = plan.numerics.precision.dtype
    args, kwargs = _calls(plan, example)
    made = _Maker(place, dtype)
    block = made.module(_block(initial.skeleton(plan.build), plan.blocks))
    try:
        forwards: list[float] = []
        backwards: list[float] = []
        kept = _kept_bytes(block, lambda: block(*made.values(args), **made.values(kwargs)))
        if place.type == "cuda":
            torch.cuda.reset_peak_memory_stats(place)
        held = torch.cuda.memory_allocated(place) if place.type == "cuda" else 0
        ends = SYSTEM.monotonic() + seconds
        while len(forwards) < WARM + LEAST or (SYSTEM.monotonic() < ends and len(forwards) < WARM + MOST):
            given, named = made.values(args), made.values(kwargs)
            _wait(place)
            start = SYSTEM.monotonic()
            outputs = [leaf for leaf in tree_leaves(block(*given, **named)) if _differentiable(leaf)]
            _wait(place)
            between = SYSTEM.monotonic()
            torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])
            _wait(place)
            forwards.append(between - start)
            backwards.append(SYSTEM.monotonic() - between)
            block.zero_grad(set_to_none=True)
        peak = torch.cuda.max_memory_allocated(place) - held if place.type == "cuda" else 0
    except (RuntimeError, IndexError, TypeError) as error:
        what = f"the first block of {plan.blocks!r}" if plan.blocks else "the model"
        raise ModelError(f"{what} does not run with made-up values: {error}") from error
    return BlockTimes(
        model=profile.digest,
        forward=statistics.median(forwards[WARM:]),
        backward=statistics.median(backwards[WARM:]),
        flops=profile.block.flops,
        peak_bytes=peak,
        kept_bytes=kept,
        repeats=len(forwards) - WARM,
    )


def _block(model: nn.Module, path: str | None) -> nn.Module:
    return model if path is None else next(find_blocks(model, path).children())


def _calls(plan: ShardRequest, example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of the first block, on meta."""
    model = initial.outline(plan.build)
    seen: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def note(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.append((args, kwargs))
        raise _Seen

    device = next(model.parameters()).device
    given = tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, example)
    handle = _block(model, plan.blocks).register_forward_pre_hook(note, with_kwargs=True)
    try:
        with torch.random.fork_rng(devices=[]), device, torch.no_grad(), Constants():
            Caller(model)(model.train(), given)
    except _Seen:
        return seen[0]
    finally:
        handle.remove()
    raise ModelError(f"the model's forward does not call its first block at {plan.blocks!r}")


class _Maker:
    """Makes up weights and inputs on a device, in the dtype in which the run computes; None for the model's own."""

    def __init__(self, device: torch.device, dtype: torch.dtype | None) -> None:
        self._device, self._dtype = device, dtype
        self._random = torch.Generator(device).manual_seed(0)

    def module(self, block: nn.Module) -> nn.Module:
        for module in block.modules():
            for name, parameter in module.named_parameters(recurse=False):
                value = self._tensor(parameter) * 0.02
                module.register_parameter(name, nn.Parameter(value, requires_grad=parameter.requires_grad))
        return block.to(self._device).train()

    def values(self, given: Any) -> Any:
        return tree_map(lambda leaf: self._input(leaf) if isinstance(leaf, torch.Tensor) else leaf, given)

    def _input(self, like: torch.Tensor) -> torch.Tensor:
        return self._tensor(like).requires_grad_(like.is_floating_point())

    def _tensor(self, like: torch.Tensor) -> torch.Tensor:
        if like.dtype == torch.bool:
            return torch.ones(like.shape, dtype=torch.bool, device=self._device)
        if not like.is_floating_point():
            return torch.zeros(like.shape, dtype=like.dtype, device=self._device)
        dtype = self._dtype or like.dtype
        return torch.randn(like.shape, dtype=dtype, device=self._device, generator=self._random)


def _kept_bytes(block: nn.Module, call: Callable[[], Any]) -> int:
    """Return the bytes that a forward leaves for the backward, beside the weights."""
    own = {parameter.untyped_storage()._cdata for parameter in (*block.parameters(), *block.buffers())}
    kept: dict[int, int] = {}
    alive = []

    def save(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            kept[storage._cdata] = storage.nbytes()
            alive.append(storage)
        return tensor

    with saved_tensors_hooks(save, lambda saved: saved):
        output = call()
    total = sum(kept.values())
    del output
    return total


def _differentiable(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

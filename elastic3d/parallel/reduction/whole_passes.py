"""Passes that leave out a block, where ranks meet at each block: refused, by the block's name.

With several data-parallel ranks a block's parameters are gathered where it runs, and its gradients are exchanged where
its backward pass ends. Ranks know what arrives by its order alone. One that leaves out a block, as stochastic depth
does by chance for some micro-batches, would take another block's weights or gradients for those it waits for.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from elastic3d.errors import ModelError

INSTEAD = "or leave blocks= out, which shards and reduces the model as one"


def check_whole_passes(module: nn.Module, blocks: Iterable[tuple[str, nn.Module]]) -> None:
    """Have each forward pass of a stage's training end with ModelError if a block with parameters did not run in it.

    blocks: those that the stage has, by name.
    """
    names = []
    ran: set[str] = set()
    for name, block in blocks:
        if any(True for _ in block.parameters()):
            names.append(name)
            block.register_forward_hook(partial(_note, ran, name))
    if names:
        module.register_forward_pre_hook(partial(_begin, ran))
        module.register_forward_hook(partial(_end, ran, names))


def _note(ran: set[str], name: str, *_: Any) -> None:
    ran.add(name)


def _begin(ran: set[str], *_: Any) -> None:
    ran.clear()


def _end(ran: set[str], names: list[str], module: nn.Module, *_: Any) -> None:
    if len(ran) == len(names) or not (module.training and torch.is_grad_enabled()):
        return
    left_out = next(name for name in names if name not in ran)
    raise ModelError(
        f"block {left_out!r} did not run in a pass of training, and ranks that share parameters meet at each block in "
        "every pass. Trying again does not help: run it and use its output for every micro-batch (times 0 where it is "
        f"to be left out), {INSTEAD}"
    )

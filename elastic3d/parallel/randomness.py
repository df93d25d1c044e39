"""Random numbers that do not depend on the layout: keyed by (seed, step, micro-batch, place in the model).

Before each block and after it, whether the block is here or on another stage, the default generators are seeded anew,
so that the numbers drawn by a block, or by the code after it, depend neither on earlier blocks nor on the rank. The
hooks are on the block itself, outside whatever recomputes within it. Where the user's forward recomputes whole blocks,
they are seeded again in the backward pass, under the micro-batch that the backward pass says it is working on.

Where sequences are cut into chunks, the number of the chunk is in the key.

If tensor-parallel ranks have different parts of one activation, their number on that axis is in the key as well; if
they have the same, it is not.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from blake3 import blake3
from torch import nn

from elastic3d.devices import ComputeDevice


def keyed_seed(*parts: object) -> int:
    """Return a 63-bit seed for `parts`, the same in every process and on every machine."""
    return int.from_bytes(blake3(repr(parts).encode()).digest(8), "little") >> 1


class Randomness:
    """Seeds torch's default generators by place. `at` sets the step and micro-batch of the next pass."""

    def __init__(self, seed: int, device: ComputeDevice) -> None:
        self.seed, self._device = seed, device
        self.part: int | None = None  # the tensor-parallel rank
        self.parts_between = False  # whether activations between layers are parts
        self._where: tuple[int, ...] = (0, 0)

    def at(self, step: int, micro_batch: int, *, chunk: int | None = None) -> None:
        """Set which micro-batch of which step the next forward or backward pass works on.

        chunk: which part of its sequences; None where they are not cut.
        """
        self._where = (step, micro_batch) if chunk is None else (step, micro_batch, chunk)

    def enter(self, place: str, *, parts: bool = False) -> None:
        """Seed the default generators for what comes at `place`. parts: it computes on parts of activations."""
        key = (place, self.part) if parts else (place,)
        self._device.seed(keyed_seed(self.seed, *self._where, *key))

    def install(self, model: nn.Module, blocks: Iterable[tuple[str, nn.Module]]) -> None:
        """Seed at the model's start, and around each block, whose names are global; stand-ins count as blocks."""
        self.before(model, "start")
        for name, block in blocks:
            self.before(block, f"{name} in", parts=self.parts_between)
            self.after(block, f"{name} out", parts=self.parts_between)

    def before(self, module: nn.Module, place: str, *, parts: bool = False) -> None:
        """Seed before each forward of a module."""

        def hook(module: nn.Module, args: Any) -> None:
            self.enter(place, parts=parts)

        module.register_forward_pre_hook(hook)

    def after(self, module: nn.Module, place: str, *, parts: bool = False) -> None:
        """Seed after each forward of a module."""

        def hook(module: nn.Module, args: Any, output: Any) -> None:
            self.enter(place, parts=parts)

        module.register_forward_hook(hook)

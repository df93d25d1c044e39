"""Blocks of the model that compute wrongly or take longer; their parameters are those of the demo's."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor

from chaos.gpu.emulated_device import EmulatedDevice
from chaos.scripts.injectors.custody import gathered
from chaos.scripts.injectors.fault import Fault
from chaos.scripts.injectors.memory import full
from chaos.scripts.train_gpt import Block
from elastic3d.clock import SYSTEM


class FaultyBlock(Block):
    """A block that may fail; its parameters are those of the demo's.

    first: it is this rank's first. work: products of matrices that a forward pass computes besides; a backward pass
    twice as many. idle: seconds that a forward pass sleeps besides, and a backward pass twice, as beside a device.
    """

    first = False
    work: ClassVar[int] = 0
    idle: ClassVar[float] = 0.0

    def forward(self, x: Tensor) -> Tensor:
        """As the demo's, unless it is time."""
        fault = Fault.present_one
        if fault is None:
            return self._timed(x, None)
        if self.first:
            fault.forward()
        wrong, bit = fault.wrong(self), fault.bit
        if wrong == "gathered":
            gathered(self.down.weight, fault.rank)
        if wrong == "input":
            x.register_hook(lambda gradient: flipped(gradient, bit))  # type: ignore[no-untyped-call]
        if wrong == "weight":
            _change_next_gradient(self.down.weight, lambda gradient: flipped(gradient, bit))
        if wrong == "memory":
            device = EmulatedDevice(0)
            if fault.micro_batch % 2 == 0:
                full(device)
            x.register_hook(lambda gradient: full(device))  # type: ignore[no-untyped-call]
        if wrong == "nan":
            _change_next_gradient(self.down.weight, lambda gradient: gradient * torch.nan)
        y = self._timed(x, fault)
        return y + (flipped(y.detach(), bit) - y.detach()) if wrong == "output" else y

    def _timed(self, x: Tensor, fault: Fault | None) -> Tensor:
        """Compute, and tell a fault how long each way takes."""
        # A tensor of its own: the hooks of one that is another block's output too run in that block's order.
        x = x.view_as(x)
        begun = SYSTEM.monotonic()
        _work(self.work)
        SYSTEM.sleep(self.idle)
        y = super().forward(x)
        if fault is not None:
            fault.computed(SYSTEM.monotonic() - begun)
        if y.requires_grad and x.requires_grad:
            y.register_hook(lambda gradient: begin())  # type: ignore[no-untyped-call]
            x.register_hook(lambda gradient: end())  # type: ignore[no-untyped-call]

        def begin() -> None:
            nonlocal begun
            begun = SYSTEM.monotonic()
            _work(2 * self.work)
            SYSTEM.sleep(2 * self.idle)

        def end() -> None:
            if fault is not None:
                fault.computed(SYSTEM.monotonic() - begun)

        return y


def _work(products: int) -> None:
    """Compute for a while, to no end: passes then take longer than all else, and no bit is another."""
    for _ in range(products):
        torch.mm(_MATRIX, _MATRIX)


_MATRIX = torch.full((128, 128), 0.5)


def _change_next_gradient(weight: Tensor, change: Callable[[Tensor], Tensor]) -> None:
    """Have the next gradient of a weight be another one: in a pipeline, that of the next pass back."""

    def once(gradient: Tensor) -> Tensor:
        handle.remove()
        return change(gradient)

    handle = weight.register_hook(once)  # type: ignore[no-untyped-call]


def flipped(tensor: Tensor, bit: int) -> Tensor:
    """Return a copy of a tensor of float32 with one bit of its first number flipped."""
    changed = tensor.clone()
    changed.view(-1)[:1].view(torch.int32)[0] ^= 1 << bit
    return changed

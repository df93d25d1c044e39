"""Destinations for a state to be loaded: the memory of this rank's tensors, as regions to be filled with bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from checkpointing.format.tiles import Box, TensorSpec
from checkpointing.interchange.tensors import buffer_of
from elastic3d.devices import ComputeDevice, DeviceLoad
from elastic3d.parallel.state import TensorInMemory


class RestoreBuffers:
    """Where the bytes of each wanted box go: straight into a tensor in plain memory, else into a buffer first.

    A tensor may have another dtype than the saved spec it is held under; then it is given the values. device: where the
    tensors are.
    """

    def __init__(self, held: Iterable[TensorInMemory], device: ComputeDevice) -> None:
        self._device = device
        self._targets: dict[str, tuple[TensorInMemory, torch.Tensor]] = {}
        for one in held:
            if one.box.numel:
                into = one.local
                saved = getattr(torch, one.spec.dtype)
                in_place = into.device.type == "cpu" and into.is_contiguous() and into.dtype == saved
                if device.exclusive or not in_place:
                    into = torch.empty(into.shape, dtype=saved)
                self._targets[one.spec.key] = (one, into)

    def wanted(self) -> Iterator[tuple[TensorSpec, Box]]:
        """Yield what this rank needs."""
        for held, _ in self._targets.values():
            yield held.spec, held.box

    def destination(self, spec: TensorSpec, box: Box) -> memoryview:
        """Return the memory of one wanted box."""
        held, into = self._targets[spec.key]
        assert box == held.box
        return buffer_of(into)

    def settle(self) -> None:
        """Copy buffered bytes into their tensors; those of a device take them as they are, contiguous."""
        with torch.no_grad():
            rest: list[tuple[torch.Tensor, torch.Tensor]] = []
            self._device.load(self._loads(rest))
            for local, values in rest:
                local.copy_(values)

    def _loads(self, rest: list[tuple[torch.Tensor, torch.Tensor]]) -> Iterator[DeviceLoad]:
        """Yield what the device is to take, and add to `rest` what goes from there to its tensor."""
        for held, into in self._targets.values():
            local = held.local
            if into.data_ptr() == local.data_ptr():
                continue
            values = into.to(local.dtype)
            if local.is_contiguous():
                yield DeviceLoad(source=values, target=local)
            else:
                target = torch.empty(local.shape, dtype=local.dtype, device=local.device)
                yield DeviceLoad(source=values, target=target)
                rest.append((local, target))

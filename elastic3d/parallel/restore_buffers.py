"""Destinations for a state to be loaded: the memory of this rank's tensors, as regions to be filled with bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from checkpointing.format.tiles import Box, TensorSpec
from checkpointing.interchange.tensors import buffer_of
from elastic3d.parallel.state import TensorInMemory


class RestoreBuffers:
    """Where the bytes of each wanted box go: straight into a tensor in plain memory, else into a buffer first.

    A tensor may have another dtype than the saved spec it is held under; then it is given the values.
    """

    def __init__(self, held: Iterable[TensorInMemory]) -> None:
        self._targets: dict[str, tuple[TensorInMemory, torch.Tensor]] = {}
        for one in held:
            if one.box.numel:
                into = one.local
                saved = getattr(torch, one.spec.dtype)
                if into.device.type != "cpu" or not into.is_contiguous() or into.dtype != saved:
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
        """Copy buffered bytes into their tensors."""
        with torch.no_grad():
            for held, into in self._targets.values():
                if into.data_ptr() != held.local.data_ptr():
                    held.local.copy_(into)

"""Room for state that is to be loaded: the memory of this rank's tensors, as regions to be filled with bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from checkpointing.format.tiles import Box, TensorSpec
from elastic3d.parallel.state import TensorInMemory, buffer_of


class Room:
    """Where the bytes of each wanted box go: into the tensor itself where it is plain memory, else beside it first.

    Held with the spec of what was saved, a tensor may be of another dtype, and is given the values.
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
        """Copy what was put beside its tensor to where it belongs."""
        with torch.no_grad():
            for held, into in self._targets.values():
                if into.data_ptr() != held.local.data_ptr():
                    held.local.copy_(into)

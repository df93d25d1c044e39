"""Reading numbers that are queued on a device: together, since each by itself would wait for all of its work."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

Copy = Callable[[torch.Tensor], Callable[[], torch.Tensor]]
"""Queues the copy of a vector, and returns what waits for it and returns it."""


class Reading:
    """Tensors on their way to the host, begun in the order of the device's work.

    on_host: whether a tensor is there already. copy: for a vector that has all those that are not.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], on_host: Callable[[torch.Tensor], bool], copy: Copy) -> None:
        self._flat = [tensor.detach().reshape(-1).to(torch.float64) for tensor in tensors]
        self._away = [not on_host(tensor) for tensor in tensors]
        queued = [vector for vector, away in zip(self._flat, self._away, strict=True) if away]
        self._copied = copy(torch.cat(queued)) if queued else None

    def wait(self) -> list[torch.Tensor]:
        """Return the numbers of each tensor as a float64 vector on the host, once they are there."""
        if self._copied is None:
            return self._flat
        sizes = [vector.numel() for vector, away in zip(self._flat, self._away, strict=True) if away]
        copied = iter(torch.split(self._copied(), sizes))
        return [next(copied) if away else vector for vector, away in zip(self._flat, self._away, strict=True)]

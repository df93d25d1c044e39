"""Several ranks of one world on one CUDA device: collectives over gloo, and pipelines' messages over the host.

NCCL refuses two ranks on one device. gloo takes CUDA tensors in collectives, but neither sends nor receives them.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist

from elastic3d.devices import register
from elastic3d.devices.cuda import CudaDevice

KIND = "cuda-gloo"
LOOPBACK = "lo" if sys.platform == "linux" else ""


class SharedCuda(CudaDevice):
    """Device 0, whatever the slot; nobody waits for a turn on it."""

    kind = KIND
    backend = "cpu:gloo,cuda:gloo"
    exclusive = False

    def __init__(self, index: int) -> None:
        super().__init__(0)


def install() -> None:
    """Add the kind for this process and those forked from it."""
    register(KIND, SharedCuda)


def stage_messages(*, everything: bool = False) -> None:
    """Have pipelines send and receive CUDA tensors by way of the host. everything: those of the host as well."""
    send_all = dist.batch_isend_irecv

    def staged(messages: list[dist.P2POp]) -> list[Any]:
        on_host, received = [], []
        for message in messages:
            direct = message.tensor.device.type == "cpu" and not everything
            incoming = message.op is dist.irecv
            if direct:
                buffer = message.tensor
            elif incoming:
                buffer = torch.empty(message.tensor.shape, dtype=message.tensor.dtype)
            else:
                buffer = message.tensor.detach().to("cpu", copy=True).contiguous()
            on_host.append(dist.P2POp(message.op, buffer, message.peer, message.group, message.tag))
            received.append(message.tensor if incoming and not direct else None)
        works = send_all(on_host)
        assert len(works) == len(on_host)
        return [
            _Work(work, message.tensor, target) for work, message, target in zip(works, on_host, received, strict=True)
        ]

    dist.batch_isend_irecv = staged  # type: ignore[assignment]


class _Work:
    """One message; what came is on the device once it was waited for."""

    def __init__(self, work: Any, buffer: torch.Tensor, target: torch.Tensor | None) -> None:
        self._work, self._buffer, self._target = work, buffer, target

    def wait(self, *given: Any) -> bool:
        """Wait for it."""
        self._work.wait(*given)
        if self._target is not None:
            with torch.no_grad():
                self._target.copy_(self._buffer)
            self._target = None
        return True

    def is_completed(self) -> bool:
        """Return whether it has come."""
        return bool(self._work.is_completed())

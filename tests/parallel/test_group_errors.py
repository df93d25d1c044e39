"""Collectives that fail behind the host's back."""

from __future__ import annotations

import queue
from typing import Any

import pytest
import torch.distributed as dist

from chaos.gpu.emulated_device import EmulatedDevice
from elastic3d.devices import device_at
from elastic3d.parallel.group_errors import EVERY, GroupErrors
from elastic3d.parallel.peer_errors import is_lost_peer

GROUPS: dict[str, Any] = {"tp": "one", "dp": "other"}


class Broken(EmulatedDevice):
    """A device of which one group fails after a few looks."""

    def __init__(self, looks: int) -> None:
        super().__init__(0)
        self.looks: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._left = looks

    def group_error(self, group: Any) -> str:
        self.looks.put(group)
        self._left -= 1
        return "NCCL reports REMOTE_ERROR" if group == "other" and self._left <= 0 else ""


def test_a_failure_is_told_once_and_counts_as_a_lost_peer() -> None:
    """With the group's axis and what the library says, as if the collective had raised it."""
    failures: queue.SimpleQueue[BaseException] = queue.SimpleQueue()
    GroupErrors(GROUPS, Broken(6), failures.put)
    failure = failures.get(timeout=60)
    assert str(failure) == "a collective of group dp failed on the device: NCCL reports REMOTE_ERROR"
    assert isinstance(failure, dist.DistBackendError)
    assert is_lost_peer(failure)
    with pytest.raises(queue.Empty):
        failures.get(timeout=3 * EVERY)


def test_nobody_looks_after_the_end() -> None:
    """Ranks that are done end one after the other, which is no failure."""
    failures: queue.SimpleQueue[BaseException] = queue.SimpleQueue()
    device = EmulatedDevice(0)
    errors = GroupErrors(GROUPS, device, failures.put)
    errors.stop()
    device.broken = "NCCL reports REMOTE_ERROR"
    with pytest.raises(queue.Empty):
        failures.get(timeout=5 * EVERY)


def test_groups_of_the_cpu_raise_by_themselves() -> None:
    assert device_at("cpu", 0).group_error(GROUPS["tp"]) == ""

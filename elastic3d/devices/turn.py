"""The turn of one trainer after another on a device.

A trainer is let go when the one before is reaped. Its memory may come back later than that: the driver frees it after
the process has gone, and what the process had forked may hold it for longer.
"""

from __future__ import annotations

from elastic3d.clock import SYSTEM, Clock
from elastic3d.devices.device import ComputeDevice
from elastic3d.log import process_log

LIMIT = 10.0
"""Seconds for memory to come back; it is used as it is then, and what does not fit says so."""

NEAR = 0.02
"""Part of the memory that may be missing: contexts of two processes are never quite alike."""

PAUSE = 0.02


def await_memory(device: ComputeDevice, expected: int, *, clock: Clock = SYSTEM, limit: float = LIMIT) -> None:
    """Block until the device's free memory is back, for at most `limit` seconds; say so where it is not.

    expected: bytes that were free when no trainer held any, 0 for unknown. The device is open.
    """
    begun = clock.monotonic()
    while (free := device.free()) < (1 - NEAR) * expected:
        waited = clock.monotonic() - begun
        if waited > limit:
            process_log().emit("device.occupied", free=free, expected=expected, seconds=waited)
            return
        clock.sleep(PAUSE)

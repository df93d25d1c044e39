"""The seam between training and what it computes on: everything that is specific to a kind of device is behind it.

A trainer has one `ComputeDevice`, opened once, and every thread of it that touches tensors enters the device first.
Kinds: "cpu", and "cuda" for NVIDIA's devices and, in torch's builds for ROCm, AMD's.
"""

from elastic3d.devices.device import PINNED, ComputeDevice, CopyStream, DeviceLoad, Mark, Move, Stopwatch
from elastic3d.devices.selection import AUTO, available, choose, device_at, register

__all__ = [
    "AUTO",
    "PINNED",
    "ComputeDevice",
    "CopyStream",
    "DeviceLoad",
    "Mark",
    "Move",
    "Stopwatch",
    "available",
    "choose",
    "device_at",
    "register",
]

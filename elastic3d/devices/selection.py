"""Which kind of device a job trains on: as asked, or what is there. Nothing here touches a device.

A template is forked, and no fork survives an initialised CUDA. So what is there is read from the system's own files,
and what torch can use from how it was built.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from elastic3d import environment
from elastic3d.devices.cpu import CpuDevice
from elastic3d.devices.cuda import CudaDevice
from elastic3d.devices.device import ComputeDevice
from elastic3d.errors import ConfigurationError, UsageError

AUTO = "auto"
"""The device that is there, the CPU where none is."""

_KINDS: dict[str, Callable[[int], ComputeDevice]] = {"cpu": lambda index: CpuDevice(), "cuda": CudaDevice}
_HIDING_NVIDIA = ("CUDA_VISIBLE_DEVICES",)
_HIDING_AMD = (*_HIDING_NVIDIA, "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerators:
    """What the system's files show of a host's accelerators, whether torch can use them or not."""

    nvidia: int = 0
    """NVIDIA devices."""
    amd: int = 0
    """AMD devices that compute."""
    hidden: str = ""
    """The environment variable that hides them all from this process, "" for none."""

    @property
    def number(self) -> int:
        """How many there are."""
        return self.nvidia + self.amd

    def __str__(self) -> str:
        counts = ((self.nvidia, "NVIDIA"), (self.amd, "AMD"))
        return " and ".join(f"{count} {maker} device(s)" for count, maker in counts if count) or "no accelerator"


def available(root: Path = Path("/"), variables: Mapping[str, str] = os.environ) -> Accelerators:
    """Return what this host has, from /dev and /sys below `root`; without those of a maker that alone are hidden."""
    nvidia = sum(1 for path in (root / "dev").glob("nvidia*") if path.name.removeprefix("nvidia").isdecimal())
    amd = 0
    if (root / "dev/kfd").exists():
        amd = sum(map(_computes, (root / "sys/class/kfd/kfd/topology/nodes").glob("*/properties")))
    hides_nvidia = _hiding(_HIDING_NVIDIA, variables) if nvidia else ""
    hides_amd = _hiding(_HIDING_AMD, variables) if amd else ""
    if nvidia and amd and bool(hides_nvidia) != bool(hides_amd):
        return Accelerators(nvidia=0 if hides_nvidia else nvidia, amd=0 if hides_amd else amd)
    return Accelerators(nvidia=nvidia, amd=amd, hidden=hides_nvidia or hides_amd)


def _hiding(names: Sequence[str], variables: Mapping[str, str]) -> str:
    """Return the first of these variables that hides all devices of those who look at it, "" for none."""
    return next((name for name in names if variables.get(name, "0").strip() in ("", "-1", "NoDevFiles")), "")


def _computes(properties: Path) -> bool:
    """Return whether a node of AMD's topology is a device: its processors have no SIMD units."""
    try:
        lines = properties.read_text().splitlines()
    except OSError:
        return False
    return any(line.startswith("simd_count ") and line.split()[1] != "0" for line in lines)


def choose(asked: str, there: Accelerators | None = None, built: str | None = None) -> str:
    """Return the kind of device to train on.

    asked: a kind, or "auto", for which ELASTIC3D_DEVICE may name one. there, built: what the host has and what torch
    was built for ("cuda", "hip", "" for the CPU alone), as found here.

    Raises:
        UsageError: There is no such kind.
        ConfigurationError: What was asked for cannot be used, or "auto" would leave a device of this host idle.
    """
    asker = f"elastic3d.run(device={asked!r})"
    if asked == AUTO and environment.DEVICE.read() != AUTO:
        asked, asker = environment.DEVICE.read(), f"{environment.DEVICE.name}={environment.DEVICE.read()}"
    if not isinstance(asked, str) or asked not in (AUTO, *_KINDS):
        raise UsageError(f"{asker}: give one of {', '.join((AUTO, *_KINDS))}")
    if asked not in (AUTO, "cuda"):
        return asked
    there = available() if there is None else there
    built = _built() if built is None else built
    usable = {"cuda": there.nvidia, "hip": there.amd}.get(built, 0)
    if usable and not there.hidden:
        return "cuda"
    instead = "train on the CPU with elastic3d.run(device='cpu') or ELASTIC3D_DEVICE=cpu"
    if there.hidden and asked == "cuda":
        raise ConfigurationError(
            f"{asker}: this host has {there}, and {there.hidden} hides them; set it to their numbers, or {instead}"
        )
    if there.number and not there.hidden:
        name = {"cuda": "CUDA", "hip": "ROCm"}.get(built, "the CPU alone")
        raise ConfigurationError(
            f"{asker}: this host has {there}, and torch {torch.__version__} is built for {name}, so that they would "
            f"be idle. Install a torch for them (https://pytorch.org/get-started/locally), or {instead}"
        )
    if asked == "cuda":
        raise ConfigurationError(
            f"{asker}: this host has {there}: neither /dev/nvidia0 nor /dev/kfd is there. In a container, pass the "
            f"devices on (docker run --gpus all); else look at the driver, or {instead}"
        )
    return "cpu"


def _built() -> str:
    return "hip" if torch.version.hip else "cuda" if torch.version.cuda else ""


def device_at(kind: str, slot: int) -> ComputeDevice:
    """Return the device of that kind which belongs to a slot of this node, not yet open."""
    return _KINDS[kind](slot)


def register(kind: str, make: Callable[[int], ComputeDevice]) -> None:
    """Add a kind of device: for tests, whose devices are emulated. make: returns the one of a slot."""
    _KINDS[kind] = make

"""Devices by name: their figures from vendors' data sheets, and the share of them that a training run can expect.

Peaks are those of dense products, without sparsity, of the SXM form if there is one. Sources: NVIDIA's data sheets
of B200 (DGX B200), H200, H100, A100, L40S and V100; links are per device and direction, half of what sheets call
NVLink or PCIe bandwidth. The network between nodes is the one of the vendor's own system (one 400 Gb/s adapter for each
device in DGX H100 and H200, 200 Gb/s in DGX A100, four of 100 Gb/s for eight devices in DGX-1), or 100 Gb/s shared by
eight if there is none. `achieved` is the share of the peak that large runs report: 52 % on A100 (Narayanan et al. 2021,
table 1), 38 to 43 % on H100 (Llama 3, table 4). All of these are a start for planning; `elastic3d calibrate` measures
the truth.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType

from elastic3d.errors import UsageError
from elastic3d.planner.costs import Costs, Device, Link
from elastic3d.values import DeviceFacts


class Number(StrEnum):
    """The number format of products."""

    FP32 = "fp32"
    TF32 = "tf32"
    BF16 = "bf16"
    FP16 = "fp16"
    FP8 = "fp8"

    @property
    def itemsize(self) -> int:
        """Bytes of one stored number."""
        return {Number.FP8: 1, Number.BF16: 2, Number.FP16: 2}.get(self, 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSheet:
    """The figures of a device before it is measured.

    peak: FLOP/s of dense products. achieved: fraction of it that whole blocks reach. memory: bytes. bandwidth: of
    memory, bytes/s. inside, between: links to devices of the same node and of others, per device. launch: seconds that
    each forward of a stage costs besides its FLOPs. reserve: bytes of memory for contexts, communicators and fragments.
    """

    name: str
    peak: Mapping[Number, float]
    achieved: float
    memory: int
    bandwidth: float
    inside: Link
    between: Link
    launch: float
    reserve: int

    def speed(self, number: Number) -> float:
        """Return the FLOP/s that blocks reach; UsageError for formats in which the device has no products."""
        if number not in self.peak:
            there = ", ".join(self.peak)
            raise UsageError(f"{self.name} has no products in {number}; give --precision one of {there}")
        return self.peak[number] * self.achieved

    def costs(self, number: Number) -> Costs:
        """Return the costs for the planner, with products in `number`."""
        device = Device(
            name=self.name,
            flops=self.speed(number),
            memory=self.memory,
            memory_bandwidth=self.bandwidth,
            reserve=self.reserve,
        )
        return Costs(device=device, inside=self.inside, between=self.between, forward=self.launch)


_GB, _TERA = 10**9, 1e12


def _device(
    name: str,
    memory: float,
    bandwidth: float,
    inside: float,
    between: float,
    achieved: float,
    peak: dict[Number, float],
    *,
    latencies: tuple[float, float] = (3e-6, 8e-6),
    launch: float = 2e-4,
    reserve: float = 4,
) -> DataSheet:
    """Return a sheet; memory in GB, bandwidth and links in GB/s, peaks in TFLOP/s."""
    return DataSheet(
        name=name,
        peak=MappingProxyType({number: flops * _TERA for number, flops in peak.items()}),
        achieved=achieved,
        memory=int(memory * _GB),
        bandwidth=bandwidth * _GB,
        inside=Link(latency=latencies[0], bandwidth=inside * _GB),
        between=Link(latency=latencies[1], bandwidth=between * _GB),
        launch=launch,
        reserve=int(reserve * _GB),
    )


_HOPPER = {Number.FP8: 1979.0, Number.BF16: 989.5, Number.FP16: 989.5, Number.TF32: 494.7, Number.FP32: 67.0}
_AMPERE = {Number.BF16: 312.0, Number.FP16: 312.0, Number.TF32: 156.0, Number.FP32: 19.5}
_BLACKWELL = {Number.FP8: 4500.0, Number.BF16: 2250.0, Number.FP16: 2250.0, Number.TF32: 1125.0, Number.FP32: 75.0}
_ADA = {Number.FP8: 733.0, Number.BF16: 362.0, Number.FP16: 362.0, Number.TF32: 183.0, Number.FP32: 91.6}

# The CPU is one core of a common server with gloo over loopback: for plans of tests and demos.
_ALL = (
    _device("b200", 180, 8000, 900, 50, 0.40, _BLACKWELL),
    _device("h200", 141, 4800, 450, 50, 0.42, _HOPPER),
    _device("h100", 80, 3350, 450, 50, 0.42, _HOPPER),
    _device("a100-80g", 80, 2039, 300, 25, 0.50, _AMPERE),
    _device("a100-40g", 40, 1555, 300, 25, 0.50, _AMPERE),
    _device("l40s", 48, 864, 32, 1.56, 0.50, _ADA, latencies=(1e-5, 3e-5)),
    _device("v100", 32, 900, 150, 6.25, 0.45, {Number.FP16: 125.0, Number.FP32: 15.7}),
    _device(
        "cpu",
        4,
        10,
        1,
        0.5,
        0.5,
        {Number.FP32: 0.1, Number.BF16: 0.05},
        latencies=(2e-4, 3e-4),
        launch=1e-3,
        reserve=0.2,
    ),
)
DEVICES: dict[str, DataSheet] = {device.name: device for device in _ALL}


CLOSE = 0.2
"""By how much the memory that is there may differ from the sheet's: drivers count GiB, sheets GB, and keep some."""


def sheet_of(facts: DeviceFacts) -> DataSheet | None:
    """Return the sheet of the device that is there, None where there is none, as for slices of one (MIG) and CPUs."""
    words = facts.name.lower().replace("-", " ").split()
    if facts.kind == "cpu" or "mig" in words:
        return None
    likely = [sheet for name, sheet in DEVICES.items() if name.partition("-")[0] in words]
    best = min(likely, key=lambda sheet: abs(sheet.memory - facts.memory), default=None)
    return best if best is not None and abs(best.memory - facts.memory) <= CLOSE * best.memory else None


def costs_of(facts: DeviceFacts, compute_bytes: int) -> Costs | None:
    """Return what to predict with where nothing was calibrated: the sheet's speeds, and the memory that is there.

    compute_bytes: of a number in products. None where the device has no sheet.
    """
    sheet = sheet_of(facts)
    if sheet is None:
        return None
    costs = sheet.costs(_number(sheet, facts, compute_bytes))
    device = replace(costs.device, name=facts.name, memory=facts.memory, reserve=max(sheet.reserve, facts.reserve))
    return replace(costs, device=device)


def peak_of(facts: DeviceFacts, compute_bytes: int) -> float | None:
    """Return the FLOP/s of dense products that the device's sheet has for a run's number format, None without a sheet.

    compute_bytes: of a number in products.
    """
    sheet = sheet_of(facts)
    return None if sheet is None else sheet.peak[_number(sheet, facts, compute_bytes)]


def _number(sheet: DataSheet, facts: DeviceFacts, compute_bytes: int) -> Number:
    """Return the format in which a run computes its products on a device."""
    halves = (Number.BF16, Number.FP16, Number.FP32)
    wanted = halves if compute_bytes == 2 else (Number.TF32, Number.FP32) if facts.products == "tf32" else halves[2:]
    return next(number for number in wanted if number in sheet.peak)


def device_named(name: str) -> DataSheet:
    """Return the sheet of that device; UsageError listing the names for any other."""
    try:
        return DEVICES[name.lower()]
    except KeyError:
        raise UsageError(f"no device is named {name!r}; there are: {', '.join(DEVICES)}") from None

"""The record of a calibration: the measurements of one machine, as a file that a person can read.

One JSON object. `schema` is the version of this format; a file of another version, or for another kind of device than
it is to be used for, is refused with what to do. Units are seconds, bytes, and FLOPs.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from elastic3d.errors import ConfigurationError
from elastic3d.planner.costs import Costs, Device, Link
from elastic3d.values import from_json, to_json

SCHEMA = 1
LAUNCH = 1e-4
"""Seconds of a stage's forward besides its FLOPs, if no block of the model was timed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One measurement of a link: an exchange of so many bytes took so many seconds, the median of several."""

    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredLink:
    """A link as a straight line through its samples: seconds = latency + bytes / bandwidth. error: relative, at worst.

    ranks: number of processes. backend: gloo or nccl.
    """

    backend: str
    ranks: int
    latency: float
    bandwidth: float
    error: float
    samples: tuple[Sample, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTimes:
    """One block of a model with real weights, on one micro-batch. flops: of its forward, as counted on meta.

    forward, backward: median seconds. peak_bytes: taken by a forward and backward beyond the weights, 0 if the device
    does not tell. kept_bytes: left by the forward for the backward. model: digest of its profile.
    """

    model: str
    forward: float
    backward: float
    flops: float
    peak_bytes: int
    kept_bytes: int
    repeats: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Everything measured on one machine.

    device: its kind ("cpu", "cuda"). name: its maker's. cores: shared by CPU slots; 0 for devices that each slot has to
    itself. number: the format of the products. flops: of the best product. inside, between: links within a node and
    between nodes, None if not measured. block: of the script's own model, None without one.
    """

    schema: int = SCHEMA
    made: str
    host: str
    torch: str
    device: str
    name: str
    threads: int
    cores: int
    memory: int
    number: str
    flops: float
    memory_bandwidth: float
    inside: MeasuredLink | None = None
    between: MeasuredLink | None = None
    block: BlockTimes | None = None

    def costs(self) -> Costs:
        """Return the costs for the planner. A link that was not measured is assumed to be like the other."""
        flops, launch = self.flops, LAUNCH
        if self.block is not None and self.block.flops:
            # Three forwards' worth of FLOPs in a forward and a backward, everything else in a block included.
            flops, launch = 3.0 * self.block.flops / (self.block.forward + self.block.backward), 0.0
        inside, between = self.inside or self.between, self.between or self.inside
        if inside is None or between is None:
            raise ConfigurationError("the calibration has no link in it; run elastic3d calibrate again, on two slots")
        return Costs(
            device=Device(
                name=self.name, flops=flops, memory=self.memory, memory_bandwidth=self.memory_bandwidth, reserve=0
            ),
            inside=Link(latency=inside.latency, bandwidth=inside.bandwidth),
            between=Link(latency=between.latency, bandwidth=between.bandwidth),
            forward=launch,
            cores=self.cores,
        )


def save(calibration: Calibration, path: Path) -> None:
    """Write a calibration, whole or not at all."""
    unfinished = path.with_name(f"{path.name}.part")
    unfinished.write_text(json.dumps(to_json(calibration), indent=2) + "\n")
    unfinished.replace(path)


def load(path: str | Path, *, device: str = "") -> Calibration:
    """Return the calibration in a file; ConfigurationError, saying what to do, for anything else.

    device: the kind it must be of, "" for any.
    """
    again = "make it again with elastic3d calibrate"
    try:
        data = json.loads(Path(path).read_text())
    except OSError as error:
        raise ConfigurationError(f"calibration {str(path)!r} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise ConfigurationError(f"calibration {str(path)!r} is not JSON ({error}); {again}") from error
    if not isinstance(data, dict) or "schema" not in data:
        raise ConfigurationError(f"{str(path)!r} is not a calibration: it has no schema; {again}")
    if data["schema"] != SCHEMA:
        raise ConfigurationError(
            f"calibration {str(path)!r} has schema {data['schema']!r}, and this elastic3d reads {SCHEMA}; {again}"
        )
    try:
        calibration = from_json(Calibration, data)
    except (TypeError, ValueError, KeyError) as error:
        raise ConfigurationError(f"calibration {str(path)!r} is damaged ({error}); {again}") from error
    _check(calibration, str(path), again)
    if device and calibration.device != device:
        raise ConfigurationError(
            f"calibration {str(path)!r} was made on {calibration.device} ({calibration.name}), and this run computes "
            f"on {device}; {again} there"
        )
    return calibration


def _check(calibration: Calibration, path: str, again: str) -> None:
    figures = {name: getattr(calibration, name) for name in ("flops", "memory", "memory_bandwidth")}
    for place, link in (("inside", calibration.inside), ("between", calibration.between)):
        if link is not None:
            figures[f"{place}.bandwidth"] = link.bandwidth
    if calibration.block is not None:
        figures |= {"block.forward": calibration.block.forward, "block.backward": calibration.block.backward}
    for name, value in figures.items():
        if not 0 < value < float("inf"):
            raise ConfigurationError(f"calibration {path!r}: {name} is {value}, which is impossible; {again}")

"""Accelerators, their driver, torch and NCCL.

Nothing of a device is touched in this process: torch is asked in one process, the driver's own program in another, and
what the system shows without either is read from /dev and /sys.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elastic3d import environment
from elastic3d.doctor import child
from elastic3d.doctor.findings import NodeFinding, Subject, failure, ok, warning
from elastic3d.doctor.running import CheckRun
from elastic3d.doctor.words import spell_size

ASKED = 50.0
"""Seconds for torch: importing it from a shared disk, and a context on each device, take their time."""

DRIVER = 15.0
"""Seconds for nvidia-smi, which without persistence mode loads the driver first."""

HELD = 1 << 30
"""Bytes of a device that somebody else holds, beyond which people are warned."""

_VENDORS = {"0x10de": "NVIDIA", "0x1002": "AMD"}
_QUERY = ("index", "name", "driver_version", "memory.total", "memory.used", "mig.mode.current")


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenDevice:
    """A device as torch sees it. memory: bytes."""

    name: str
    memory: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverDevice:
    """A device as its driver's program lists it, whether this process may see it or not. memory, used: bytes."""

    index: str
    name: str
    memory: int
    used: int
    mig: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchFacts:
    """What torch said of itself and of the devices.

    torch, cuda, hip, nccl: versions, "" for none. unsupported: why elastic3d does not work with it. error: of making
    a context. other: kind of an accelerator that is not ours. broken: devices that computed wrongly. silent: why it did
    not say everything.
    """

    torch: str = ""
    cuda: str = ""
    hip: str = ""
    gloo: bool = True
    nccl: str = ""
    unsupported: str = ""
    missing: str = ""
    devices: tuple[SeenDevice, ...] = ()
    error: str = ""
    other: str = ""
    broken: tuple[str, ...] = ()
    silent: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostDevices:
    """What this host shows of its accelerators, to any process.

    pci: vendors of those on the bus. nodes: their names in /dev. driver: its version, "" for none. driver_error: why
    its program said nothing. visible: what hides devices, as NAME=value, "" where nothing does.
    cores: that this process may use.
    """

    torch: TorchFacts
    pci: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    driver: str = ""
    driver_error: str = ""
    listed: tuple[DriverDevice, ...] = ()
    visible: str = ""
    cores: int = field(default=1)


def slots_of(facts: HostDevices, asked: int) -> int:
    """Return how many slots this node has: as asked, else its devices, else one."""
    return asked or len(facts.torch.devices) or 1


def judge(facts: HostDevices, slots: int) -> tuple[NodeFinding, ...]:
    """Say what would train here. slots: as asked for, 0 where nobody did."""
    findings = [*_torch(facts.torch)]
    if facts.torch.silent:
        findings.append(
            failure(
                Subject.DEVICE,
                "torch",
                f"torch did not say what it sees: {facts.torch.silent}",
                "import torch and torch.cuda.init() by hand; a driver that hangs needs the machine restarted",
            )
        )
    if facts.driver_error:
        findings.append(
            warning(Subject.DEVICE, "driver", facts.driver_error, "run nvidia-smi by hand, and look at dmesg for NVRM")
        )
    if facts.torch.devices:
        findings += _devices(facts, slots)
    elif not facts.torch.silent and not facts.torch.missing:
        findings += _none(facts, slots)
    findings += [
        failure(Subject.DEVICE, "product", one, "take this device out of service; a run would keep the node out")
        for one in facts.torch.broken
    ]
    return tuple(findings)


def _torch(torch: TorchFacts) -> tuple[NodeFinding, ...]:
    if torch.missing:
        return (
            failure(
                Subject.TORCH, "torch", f"cannot be imported: {torch.missing}", "pip install torch, as on all nodes"
            ),
        )
    if not torch.torch:
        return ()
    built = f"CUDA {torch.cuda}" if torch.cuda else f"ROCm {torch.hip}" if torch.hip else "the CPU alone"
    seen = f"{torch.torch}, built for {built}"
    findings = [
        failure(Subject.TORCH, "torch", f"{seen}: {torch.unsupported}", "install a torch that elastic3d works with")
        if torch.unsupported
        else ok(Subject.TORCH, "torch", seen)
    ]
    if not torch.gloo:
        findings.append(
            failure(Subject.TORCH, "gloo", "this torch was built without it", "install torch as PyTorch publishes it")
        )
    if torch.nccl:
        findings.append(ok(Subject.TORCH, "NCCL", torch.nccl))
    elif torch.devices:
        findings.append(
            failure(
                Subject.TORCH,
                "NCCL",
                "this torch was built without it, and there are devices that need it",
                "install torch as PyTorch publishes it for your CUDA or ROCm",
            )
        )
    return tuple(findings)


def _devices(facts: HostDevices, slots: int) -> list[NodeFinding]:
    devices = facts.torch.devices
    counts = Counter((one.name, one.memory) for one in devices)
    seen = ", ".join(f"{count} x {name} ({spell_size(memory)})" for (name, memory), count in counts.items())
    seen += f", driver {facts.driver}" if facts.driver else ""
    findings = []
    if len(counts) > 1:
        mig = any(" MIG " in one.name for one in devices)
        findings.append(
            failure(
                Subject.DEVICE,
                "devices",
                f"{seen}: {'MIG slices of unlike size' if mig else 'unlike devices'}",
                "give the job devices of one kind: name them in CUDA_VISIBLE_DEVICES"
                + (", or cut all into the same slices (nvidia-smi mig -cgi)" if mig else ""),
            )
        )
    elif slots > len(devices):
        findings.append(
            failure(
                Subject.DEVICE,
                "devices",
                f"{seen}; {slots} slots were asked for",
                f"use --slots {len(devices)} (and --nproc-per-node={len(devices)}), or let the job see more devices",
            )
        )
    else:
        findings.append(ok(Subject.DEVICE, "devices", seen))
    hidden = len(facts.listed) - len(devices)
    if facts.visible and hidden > 0 and not any(one.mig for one in facts.listed):
        findings.append(
            warning(
                Subject.DEVICE,
                "hidden",
                f"{facts.visible} hides {hidden} of {len(facts.listed)} devices",
                "unset it, unless that is meant",
            )
        )
    busy = [one for one in facts.listed if one.used > HELD]
    if busy:
        said = ", ".join(f"device {one.index}: {spell_size(one.used)}" for one in busy)
        findings.append(
            warning(
                Subject.DEVICE,
                "in use",
                f"somebody holds memory of {said}",
                "nvidia-smi shows which processes; end them, or the job runs out of memory",
            )
        )
    return findings


def _none(facts: HostDevices, slots: int) -> list[NodeFinding]:
    torch = facts.torch
    vendors = ", ".join(sorted(set(facts.pci)))
    first = torch.error.strip().splitlines()[0] if torch.error.strip() else ""
    if torch.other:
        return [
            warning(
                Subject.DEVICE,
                "devices",
                f"an accelerator of kind {torch.other}, which elastic3d does not train on",
                "training would run on the CPU; elastic3d trains on CUDA and ROCm devices",
            )
        ]
    if facts.nodes or facts.listed:
        there = f"{len(facts.listed) or len(facts.nodes)} device(s)"
        driver = f" with driver {facts.driver}" if facts.driver else ""
        if not torch.cuda and not torch.hip:
            return [
                failure(
                    Subject.DEVICE,
                    "devices",
                    f"{there}{driver}, and a torch that was built for the CPU alone: training would run on the CPU",
                    "install a torch for them: pip install torch --index-url https://download.pytorch.org/whl/cu128 "
                    "(for AMD: whl/rocm6.4), the same on all nodes",
                )
            ]
        if "too old" in torch.error:
            return [
                failure(
                    Subject.DEVICE,
                    "devices",
                    f"{there}{driver}: the driver is too old for a torch of CUDA {torch.cuda} ({first})",
                    "update the driver, or install a torch that was built for an older CUDA",
                )
            ]
        if facts.visible:
            return [
                failure(
                    Subject.DEVICE,
                    "devices",
                    f"{facts.visible} hides all of {there}{driver}{f' ({first})' if first else ''}",
                    "correct it or unset it; to train on the CPU on purpose, this can be left as it is",
                )
            ]
        return [
            failure(
                Subject.DEVICE,
                "devices",
                f"{there}{driver}, but torch sees none{f': {first}' if first else ''}",
                "run nvidia-smi (rocm-smi): the driver may not be loaded, not match, or be of another version than the "
                "libraries of this container",
            )
        ]
    if vendors:
        return [
            warning(
                Subject.DEVICE,
                "devices",
                f"an accelerator of {vendors} is on the bus, but there is no device of it in /dev: no driver, or a "
                "container that was not given it",
                "load the driver; docker run --gpus all; in Kubernetes a resource such as nvidia.com/gpu: 1",
            )
        ]
    seen = f"no accelerator: training would run on the CPU, {facts.cores} core(s)"
    if slots > facts.cores:
        return [
            warning(
                Subject.DEVICE,
                "devices",
                f"{seen} for {slots} slots: trainers will wait for each other",
                f"use --slots {facts.cores} (and --nproc-per-node={facts.cores}) or fewer",
            )
        ]
    return [ok(Subject.DEVICE, "devices", seen)]


def measure(run: CheckRun, slots: int) -> HostDevices:
    """Ask the system, the driver's program and torch. slots: as asked for, 0 where nobody did."""
    run.go_on("what the system shows")
    nodes, pci = seen_nodes(Path("/dev")), seen_on_bus(Path("/sys/bus/pci/devices"))
    listed: tuple[DriverDevice, ...] = ()
    driver = driver_error = ""
    if shutil.which("nvidia-smi"):
        run.go_on("nvidia-smi")
        query = ["nvidia-smi", f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader,nounits"]
        said = child.ask(query, run, limit=DRIVER)
        listed, driver = parse_driver(said.output)
        if said.code:
            driver_error = f"nvidia-smi ends with {said.code}: {(said.output or said.errors).strip()[-300:]}"
        elif said.code is None:
            driver_error = f"nvidia-smi did not answer within {DRIVER:g} s"
    run.go_on("torch and what it sees")
    said = child.ask([sys.executable, "-m", "elastic3d.doctor.device_child", str(slots)], run, limit=ASKED)
    return HostDevices(
        torch=parse_torch(said),
        pci=pci,
        nodes=nodes,
        driver=driver,
        driver_error=driver_error,
        listed=listed,
        visible=_visible(),
        cores=len(os.sched_getaffinity(0)),
    )


def parse_torch(said: child.Said) -> TorchFacts:
    """Return what device_child printed; `silent` says what is missing where it did not come to its end."""
    answers: dict[str, Any] = {}
    for line in said.output.splitlines():
        try:
            fields = json.loads(line)
        except ValueError:
            continue  # a library's own word on stdout
        if isinstance(fields, dict):
            answers |= fields
    silent = ""
    if "missing" not in answers and "broken" not in answers:
        last = (said.errors.strip().splitlines() or [""])[-1][-300:]
        how = "it did not answer in time" if said.code is None else f"its process ended with {said.code}"
        silent = f"{how}{f' ({last})' if last else ''}"
    names = TorchFacts.__dataclass_fields__.keys() - {"devices", "broken", "silent"}
    return TorchFacts(
        **{name: answers[name] for name in names if name in answers},
        devices=tuple(SeenDevice(**one) for one in answers.get("devices", ())),
        broken=tuple(answers.get("broken", ())),
        silent=silent,
    )


def parse_driver(output: str) -> tuple[tuple[DriverDevice, ...], str]:
    """Return the devices that nvidia-smi listed, and the driver's version; lines that are no list are left out."""
    listed, version = [], ""
    for line in output.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != len(_QUERY) or not cells[0].isdecimal():
            continue
        index, name, version, total, used, mig = cells
        listed.append(
            DriverDevice(
                index=index, name=name, memory=_mebibytes(total), used=_mebibytes(used), mig=mig.lower() == "enabled"
            )
        )
    return tuple(listed), version


def _mebibytes(text: str) -> int:
    return int(text) << 20 if text.isdecimal() else 0


def seen_nodes(dev: Path) -> tuple[str, ...]:
    """Return the accelerators that have a node in /dev: nvidia0 and so on; AMD's have kfd and one renderer each."""
    nvidia = sorted(one.name for one in dev.glob("nvidia[0-9]*"))
    amd = sorted(one.name for one in (dev / "dri").glob("renderD*")) if (dev / "kfd").exists() else []
    return (*nvidia, *amd)


def seen_on_bus(devices: Path) -> tuple[str, ...]:
    """Return the makers of the 3D controllers and accelerators on the bus."""
    vendors = []
    for folder in sorted(devices.glob("*")):
        try:
            kind, vendor = (folder / "class").read_text().strip(), (folder / "vendor").read_text().strip()
        except OSError:
            continue
        computes = kind.startswith(("0x0302", "0x0380", "0x1200"))
        if vendor in _VENDORS and (computes or (kind.startswith("0x03") and vendor == "0x10de")):
            vendors.append(_VENDORS[vendor])
    return tuple(vendors)


def _visible() -> str:
    """Return what hides devices from processes here, as it is set."""
    said: Sequence[str] = [
        f"{one.name}={one.read()!r}"
        for one in (environment.VISIBLE_CUDA, environment.VISIBLE_ROCM)
        if one.name in os.environ
    ]
    return ", ".join(said)

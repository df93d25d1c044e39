"""What a keeper does before it joins: it measures the script's model, and waits, ready, until the node is wanted."""

from __future__ import annotations

import os
import queue
import signal
from dataclasses import dataclass, replace
from typing import Any

from elastic3d.admission.check import CheckResult
from elastic3d.errors import ConfigurationError, MembershipError, TrainingFailed
from elastic3d.planner.costs import Costs
from elastic3d.planner.devices import costs_of, sheet_of
from elastic3d.port import Assignment
from elastic3d.values import DeviceFacts, ModelProfile, ProvenChain
from elastic3d.worker.processes import events as w
from elastic3d.worker.processes.failure import words
from elastic3d.worker.processes.slot import SlotPort

TRIES = 3
"""How many measuring trainers may lose their template before the node gives up."""

Inbox = queue.SimpleQueue[Any]


@dataclass(frozen=True, slots=True)
class Signalled:
    """A signal reached the keeper."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a measuring trainer found: the model's profile, how the devices are, and what; None where a check failed.

    proven: what it proved of the model, for the trainers to come.
    """

    profile: ModelProfile
    checks: tuple[CheckResult, ...] = ()
    device: DeviceFacts | None = None
    proven: ProvenChain | None = None


def measure(slot: SlotPort, assignment: Assignment, inbox: Inbox) -> Measured:
    """Run `main` up to `run.restore` with the model on meta; return what the trainer found.

    Faults of the script show here, as TrainingFailed or MembershipError. A template's death says nothing about the
    script: another trainer then measures.
    """
    slot.measure(assignment)
    measured: w.ProfileMeasured | None = None
    tries = 1
    while True:
        match inbox.get():
            case w.ProfileMeasured() as event:
                measured = event
            case w.TrainerExited(kind=w.ExitKind.MEASURED) if measured is not None:
                return Measured(
                    profile=measured.profile, checks=measured.checks, device=measured.device, proven=measured.proven
                )
            case w.TrainerExited(kind=w.ExitKind.TEMPLATE) if tries < TRIES:
                tries, measured = tries + 1, None
                slot.measure(assignment)
            case w.TrainerExited(kind=w.ExitKind.ERROR | w.ExitKind.OUT_OF_MEMORY) as event:
                raise TrainingFailed(words(event, assignment.node, 0))
            case w.TrainerExited() as event:
                raise TrainingFailed(f"the measuring trainer ended without a profile: {event.kind} {event.detail}")
            case w.SlotLost() as event:
                raise _lost(event)
            case Signalled() as event:
                raise MembershipError(f"ended by {signal.Signals(event.number).name} before it joined")
            case _:
                pass


def _lost(event: w.SlotLost) -> MembershipError:
    return MembershipError(f"slot {event.slot} is lost: {event.detail}")


def planned_with(calibrated: Costs | None, device: DeviceFacts | None, profile: ModelProfile) -> Costs | None:
    """Return what layouts are chosen by: the calibration, else the data sheet of the device, None for neither.

    The memory of a device, and what of it is not the model's, is what is there: a calibration measures speeds.
    ConfigurationError for a calibration of another device than the one that is there.
    """
    if device is None or device.kind == "cpu":
        return calibrated
    if calibrated is None:
        return costs_of(device, profile.compute_bytes)
    if calibrated.device.name != device.name:
        raise ConfigurationError(
            f"the calibration is of {calibrated.device.name}, and this node computes on {device.name}: make one here "
            "with elastic3d calibrate, or leave calibration= out"
        )
    sheet = sheet_of(device)
    reserve = max(calibrated.device.reserve, device.reserve, sheet.reserve if sheet is not None else 0)
    return replace(calibrated, device=replace(calibrated.device, memory=device.memory, reserve=reserve))


def wait_at_gate(gate: str, inbox: Inbox) -> bool:
    """Wait, ready to join, until the file `gate` is there; return whether the node may join.

    MembershipError if a slot is lost meanwhile.
    """
    while gate and not os.path.exists(gate):
        try:
            event = inbox.get(timeout=0.02)
        except queue.Empty:
            continue
        match event:
            case Signalled():
                return False
            case w.SlotLost():
                raise _lost(event)
    return True

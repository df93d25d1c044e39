"""A standby: a fork of the template that opens its slot's device and loads its libraries, and becomes the next trainer.

After a death, a new trainer's context and its first calls of libraries take longer than all the rest of a recovery. A
standby has made them while the trainer before it trained; it has no model, and knows nothing of a generation. It is
one of the template's children and ends with it. When a trainer is to be forked, the template gives what the trainer
would have been given to the standby instead; one that is not ready, or does not answer, is killed, and a trainer is
forked as if there had been none.

What it has called leaves no trace: the trainer finds environment, random numbers and torch's flags as after a fork.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch

from elastic3d.clock import SYSTEM
from elastic3d.devices import ComputeDevice, contract, device_at, oom_killer
from elastic3d.port import Assignment
from elastic3d.shortfall import STANDBY
from elastic3d.values import from_json
from elastic3d.worker.processes import packets, process

_ANSWER_SECONDS = 1.0
"""Seconds for it to answer when it is to be the trainer: it computes one number on its device first."""

_LEAST_FREE = 0.02
"""Part of a device's memory that has to be free beside trainer and standby: the trainer may yet take more."""

_NAME = Path("/proc/self/comm")


@dataclass(slots=True)
class Standby:
    """A standby as its template knows it. warm: it is ready. error: why it ends, as far as it has said."""

    pid: int
    control: socket.socket
    warm: bool = False
    error: str = ""

    def hear(self) -> float | None:
        """Read a word of it; return the seconds that it has taken to be warm, if it says that it is now."""
        try:
            said = json.loads(self.control.recv(packets.LONGEST) or b"{}")
        except OSError:
            return None
        self.error = said.get("error", self.error)
        if "seconds" in said:
            self.warm = True
            return float(said["seconds"])
        return None

    def take(self, spec: str, descriptors: list[int]) -> bool:
        """Give it what a trainer is given; return whether it has become one."""
        if not self.warm:
            return False
        try:
            packets.send(self.control, spec.encode(), descriptors)
            if select.select([self.control], [], [], _ANSWER_SECONDS)[0]:
                answer = json.loads(self.control.recv(packets.LONGEST) or b"{}")
                self.error = answer.get("error", self.error)
                return "taken" in answer
        except OSError:
            pass
        self.error = self.error or f"it has not answered within {_ANSWER_SECONDS} s"
        return False


def stand_by(control: socket.socket, spec: str) -> tuple[str, tuple[int, ...]]:
    """Warm the device of an assignment like the next one, and wait; return what the trainer is given.

    To be called first in a fork of the template, which ends here if the device does not serve, or the template is gone.
    """
    former = _renamed(STANDBY)
    oom_killer.be_killed_first()
    assignment = from_json(Assignment, json.loads(spec))
    device = device_at(assignment.device, assignment.slot)
    begun = SYSTEM.monotonic()
    try:
        _warm(device, assignment)
        if short := _short(device.free(), int(_LEAST_FREE * assignment.device_free)):
            _fail(control, short)
        control.sendall(json.dumps({"seconds": SYSTEM.monotonic() - begun}).encode())
        received = packets.receive(control)
        if received is None:
            process.leave(process.ExitCode.ORPHANED)
        data, descriptors = received
        device.begin_reading([torch.ones(1, device=device.torch_device)]).wait()
        _renamed(former)
        control.sendall(json.dumps({"taken": True}).encode())
    except Exception as error:  # noqa: BLE001 - the edge of a process: whatever it is, the template says it
        _fail(control, f"{type(error).__name__}: {error}")
    control.close()
    return data.decode(), tuple(descriptors)


def _warm(device: ComputeDevice, assignment: Assignment) -> None:
    from elastic3d.parallel.warming import warm  # takes seconds where a template has imported nothing of the script

    if assignment.threads:
        torch.set_num_threads(assignment.threads)
    tp = assignment.layout.tp if assignment.layout is not None else 1
    with _environment_kept():
        contract.apply(contract.settings(assignment.device, interface=assignment.interface, tp=tp))
        device.open()
        warm(device)


def _short(free: int, least: int) -> str:
    """Return why a standby would take what the trainer may yet need, "" if it does not."""
    return f"beside it {free} bytes of the device are free, and {least} are left to the trainer" if free < least else ""


def _fail(control: socket.socket, error: str) -> NoReturn:
    with contextlib.suppress(OSError):
        control.sendall(json.dumps({"error": error[:1000]}).encode())
    process.leave(process.ExitCode.ORPHANED)


def _renamed(name: str) -> str:
    """Give this process another name; return the one that it had."""
    try:
        former = _NAME.read_text().strip()
        _NAME.write_text(name)
    except OSError:  # some sandboxes have no such file: it is only for people, and for who counts trainers
        return name
    return former


@contextlib.contextmanager
def _environment_kept() -> Iterator[None]:
    """Give the environment back as it was: the trainer sets its own, and says what it replaces."""
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in [name for name in os.environ if name not in before]:
            del os.environ[name]
        os.environ.update(before)

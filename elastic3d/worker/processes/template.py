"""The template: a process that has everything imported and does nothing but fork and reap trainers.

It is single-threaded and has run no tensor maths, so that its forks are safe however many threads the keeper has. It
leads its own session, out of reach of torchrun's group kill, and ignores SIGTERM and SIGINT. It waits on one SEQPACKET
socket from its keeper and on a wakeup descriptor for SIGCHLD.

A trainer's death is noticed without reaping it, so that its process group still has its number when the group is
killed: data-loader workers hold the trainer's sockets, and would hide its death from its peers for as long as they
live. The exit is reported only when the whole group is gone. As the nearest subreaper, the template reaps whatever a
trainer leaves.

Where its keeper asks for it, it forks a standby besides, which the next trainer may be made of (standby.py).

Nothing here needs torch: where forks are not safe, the same loop runs in a bare interpreter and each trainer is a
new one (spawn.py).
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import socket
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn, get_args

from elastic3d import output
from elastic3d.clock import SYSTEM
from elastic3d.tagged import Tagged
from elastic3d.worker.processes import packets, process
from elastic3d.worker.processes.standby import Standby, stand_by

TrainerMain = Callable[[str, tuple[int, ...]], object]
"""Becomes a trainer: it is called with a spec and inherited descriptors in a fresh child, and ends the process
itself."""

_GROUP_SECONDS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fork:
    """Keeper to template: fork a trainer; its descriptors come with the packet.

    standby: the slot's standby may become it, if there is one.
    """

    trainer: int
    spec: str
    standby: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Stand:
    """Keeper to template: fork a standby, for a trainer whose assignment is like this one, unless there is one."""

    spec: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """Keeper to template: SIGKILL the trainer's group. A group that is already dead is no error."""

    trainer: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateReady:
    """Template to keeper: it is ready for the first fork."""

    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Forked:
    """Template to keeper: the trainer is alive, and leads the process group `pid`."""

    trainer: int
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Unforked:
    """Template to keeper: the machine refused the fork."""

    trainer: int
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessExited:
    """Template to keeper: the trainer and its group are dead and reaped. code: minus the number of a signal."""

    trainer: int
    pid: int
    code: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StandbyReady:
    """Template to keeper: a standby could become the next trainer. seconds: what it took to be warm."""

    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StandbyTaken:
    """Template to keeper: it is the trainer `pid` now."""

    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StandbyEnded:
    """Template to keeper: there is no standby any more, and it has become no trainer."""

    error: str


Packet = (
    Fork | Stand | StandbyReady | StandbyTaken | StandbyEnded | Kill | TemplateReady | Forked | Unforked | ProcessExited
)
_PACKETS: Tagged[Packet] = Tagged(get_args(Packet))


def send(control: socket.socket, packet: Packet, descriptors: Sequence[int] = ()) -> None:
    """Send one packet whole, with descriptors."""
    packets.send(control, json.dumps(_PACKETS.to_json(packet)).encode(), descriptors)


def receive(control: socket.socket) -> tuple[Packet, list[int]] | None:
    """Return the next packet and its descriptors (closed on exec), None at the end."""
    received = packets.receive(control)
    if received is None:
        return None
    data, descriptors = received
    return _PACKETS.from_json(*json.loads(data)), descriptors


def fork_template(trainer_main: TrainerMain, others: Sequence[socket.socket] = ()) -> tuple[int, socket.socket]:
    """Fork a template from this process; return its pid and the keeper's end of its socket.

    others: the keeper's ends of other templates' sockets, which this one closes. To be called on the keeper's main
    thread before there is another thread (`process.fork_hazard` returns None).
    """
    keeper = os.getpid()
    ours, theirs = packets.socket_pair()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = _fork()
    if pid:
        theirs.close()
        return pid, ours
    try:
        os.setsid()
        for end in (ours, *others):
            end.close()
        serve(theirs, trainer_main, keeper)
    finally:
        os._exit(1)


def serve(control: socket.socket, trainer_main: TrainerMain, keeper: int) -> NoReturn:
    """Be the template until the keeper's end of `control` closes. keeper: the pid of the parent."""
    process.die_with_parent(keeper)
    process.adopt_orphans()
    output.survive_readers()
    try:
        _Template(control, trainer_main).loop()
    except Exception:  # noqa: BLE001 - the edge of a process: whatever it is, say it and end
        traceback.print_exc()
        process.leave(process.ExitCode.ORPHANED)
    process.leave(process.ExitCode.DONE)


def run_trainer_main(trainer_main: TrainerMain, spec: str, descriptors: tuple[int, ...]) -> NoReturn:
    """Run `trainer_main` in a fresh child; nothing it raises gets past here."""
    output.survive_readers()
    try:
        trainer_main(spec, descriptors)
    except BaseException:  # noqa: BLE001 - the edge of a process: the stack below belongs to the template or the script
        traceback.print_exc()
    finally:
        process.leave(process.ExitCode.ERROR)


def _fork() -> int:
    with warnings.catch_warnings():
        # Python warns of native threads; process.fork_hazard has judged whether they matter.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


@dataclass(slots=True)
class _Trainer:
    trainer: int
    pid: int
    code: int | None = None
    gone_by: float = 0.0


class _Template:
    def __init__(self, control: socket.socket, trainer_main: TrainerMain) -> None:
        self._control = control
        self._trainer_main = trainer_main
        self._trainers: dict[int, _Trainer] = {}
        self._standby: Standby | None = None
        self._poll = select.poll()
        self._wakeup, self._wakeup_writer = socket.socketpair()
        self._wakeup.setblocking(False)
        self._wakeup_writer.setblocking(False)

    def loop(self) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wakeup_writer.fileno(), warn_on_full_buffer=False)
        # Imported objects stay in pages shared with the keeper and every trainer: no garbage collection touches them
        # again.
        gc.freeze()
        send(self._control, TemplateReady(pid=os.getpid()))
        self._poll.register(self._control, select.POLLIN)
        self._poll.register(self._wakeup, select.POLLIN)
        while True:
            dying = any(trainer.code is not None for trainer in self._trainers.values())
            ready = {descriptor for descriptor, _ in self._poll.poll(2 if dying else None)}
            if self._wakeup.fileno() in ready:
                with contextlib.suppress(BlockingIOError):
                    self._wakeup.recv(4096)
            if self._standby is not None and self._standby.control.fileno() in ready:
                self._hear(self._standby)
            self._reap()
            if self._control.fileno() in ready and not self._obey():
                break
        for trainer in self._trainers.values():
            process.kill_group(trainer.pid)
        if self._standby is not None:
            process.kill_group(self._standby.pid)

    def _obey(self) -> bool:
        try:
            received = receive(self._control)
        except ConnectionError:
            return False
        if received is None:
            return False
        packet, descriptors = received
        match packet:
            case Fork():
                self._fork(packet, descriptors)
            case Stand():
                self._stand(packet.spec)
            case Kill():
                trainer = self._trainers.get(packet.trainer)
                if trainer is not None:
                    process.kill_group(trainer.pid)
            case _:
                raise AssertionError(packet)
        return True

    def _fork(self, packet: Fork, descriptors: list[int]) -> None:
        pid = self._take_standby(packet.spec, descriptors) if packet.standby else None
        try:
            pid = pid or self._child(self._trainer_main, packet.spec, descriptors)
        except OSError as error:
            send(self._control, Unforked(trainer=packet.trainer, error=str(error)))
            return
        for descriptor in descriptors:
            os.close(descriptor)
        self._trainers[packet.trainer] = _Trainer(packet.trainer, pid)
        send(self._control, Forked(trainer=packet.trainer, pid=pid))

    def _stand(self, spec: str) -> None:
        if self._standby is not None:
            return
        ours, theirs = packets.socket_pair()

        def stand(spec: str, _: tuple[int, ...]) -> None:
            ours.close()
            self._trainer_main(*stand_by(theirs, spec))

        with theirs:
            try:
                pid = self._child(stand, spec, ())
            except OSError as error:
                ours.close()
                self._report(StandbyEnded(error=f"could not be forked: {error}"))
                return
        self._standby = Standby(pid, ours)
        self._poll.register(ours, select.POLLIN)

    def _hear(self, standby: Standby) -> None:
        seconds = standby.hear()
        if seconds is not None:
            self._report(StandbyReady(seconds=seconds))

    def _take_standby(self, spec: str, descriptors: list[int]) -> int | None:
        """Return the pid of the standby, which is the trainer now; None if there is none that could be."""
        standby = self._standby
        if standby is None:
            return None
        taken = standby.take(spec, descriptors)
        self._forget(standby)
        if taken:
            self._report(StandbyTaken(pid=standby.pid))
            return standby.pid
        process.kill_group(standby.pid)
        if standby.warm:
            self._report(StandbyEnded(error=standby.error))
        return None

    def _forget(self, standby: Standby) -> None:
        self._poll.unregister(standby.control)
        standby.control.close()
        self._standby = None

    def _child(self, main: TrainerMain, spec: str, descriptors: Sequence[int]) -> int:
        """Fork a child that becomes a trainer by `main`, and leads a group; return its pid. OSError if it cannot."""
        template = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = _fork()
        if pid == 0:

            def become(spec: str, inherited: tuple[int, ...]) -> None:
                self._leave_template(template)
                main(spec, inherited)

            run_trainer_main(become, spec, tuple(descriptors))
        with contextlib.suppress(PermissionError, ProcessLookupError):
            os.setpgid(pid, pid)  # both sides do it, so that neither uses the group before it exists
        return pid

    def _leave_template(self, template: int) -> None:
        os.setpgid(0, 0)
        process.die_with_parent(template)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self._control.close()
        if self._standby is not None:
            self._standby.control.close()
        self._wakeup.close()
        self._wakeup_writer.close()

    def _reap(self) -> None:
        by_pid = {trainer.pid: trainer for trainer in self._trainers.values()}
        while (dead := _next_dead()) is not None:
            trainer = by_pid.get(dead)
            if trainer is not None:
                process.kill_group(dead)
            _, status = os.waitpid(dead, 0)
            if trainer is not None:
                trainer.code = os.waitstatus_to_exitcode(status)
                trainer.gone_by = SYSTEM.monotonic() + _GROUP_SECONDS
            elif self._standby is not None and dead == self._standby.pid:
                standby = self._standby
                self._hear(standby)
                self._forget(standby)
                self._report(
                    StandbyEnded(error=standby.error or f"ended with code {os.waitstatus_to_exitcode(status)}")
                )
        for trainer in list(self._trainers.values()):
            if trainer.code is None:
                continue
            # A member that is stuck in the kernel must not hide the death for ever.
            if not process.group_exists(trainer.pid) or SYSTEM.monotonic() > trainer.gone_by:
                del self._trainers[trainer.trainer]
                self._report(ProcessExited(trainer=trainer.trainer, pid=trainer.pid, code=trainer.code))

    def _report(self, packet: Packet) -> None:
        with contextlib.suppress(ConnectionError):  # the end of file that follows will end the loop
            send(self._control, packet)


def _next_dead() -> int | None:
    """Return a child that has died, leaving it as a zombie."""
    try:
        child = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    return None if child is None else child.si_pid

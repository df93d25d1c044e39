"""The keeper's control of its template: it starts it, commands it, notices its death and replaces it.

A second template is kept in reserve: a new one has to import everything, which takes seconds on an idle machine and a
minute on a busy one, while all other nodes wait. The reserve does nothing, and shares its memory with the first.

For one thread, the slot's. The first two templates are forked on the keeper's main thread before that thread exists;
later ones are new interpreters.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from elastic3d.clock import SYSTEM
from elastic3d.log import process_log
from elastic3d.worker.processes import process, spawn, template
from elastic3d.worker.processes.spawn import Script
from elastic3d.worker.processes.survivors import TrainerUnkillable, due, survivors
from elastic3d.worker.processes.template import Packet, TrainerMain

_ANSWER_SECONDS = 10.0
_STARTS = 3
_SURVIVORS_SECONDS = 1.0
"""Seconds between two looks for processes that outlive SIGKILL, while something ought to end."""

SPARE_AFTER = 5.0
"""Seconds to wait with a second template after one died, or could not be started: recovery comes first."""


class TemplateLost(Exception):
    """Templates have died before they were ready, again and again, or no other could be started."""


@dataclass(slots=True)
class _Handle:
    pid: int
    control: socket.socket
    pidfd: int
    popen: subprocess.Popen[bytes] | None
    ready: bool = False


class TemplateSupervisor:
    """One template after another, and one in reserve."""

    def __init__(self, trainer_main: TrainerMain) -> None:
        """Fork the template, on the main thread and before there is another; start interpreters if forks are unsafe."""
        self._script = Script.current()
        self._hazard = process.fork_hazard()
        self._failed_starts = self._spare_deaths = 0
        self._answer_by: float | None = None
        self._dead_session: int | None = None
        self._survivors: dict[int, float] = {}
        self._looked_at = 0.0
        process.adopt_orphans()
        if self._hazard is None:
            self._handle = self._fork(trainer_main)
            self._spare: _Handle | None = self._fork(trainer_main, self._handle.control)
        else:
            process_log().emit(
                "template.unsafe", reason=self._hazard, consequence="each trainer starts a new interpreter"
            )
            # A bare interpreter starts in a moment, and needs no reserve.
            self._spare = None
            self._handle = self._start()
        # Not before: the templates, and so the trainers, have as many as there are.
        process.share_arenas()
        self._spare_at = SYSTEM.monotonic() + SPARE_AFTER

    @property
    def pid(self) -> int:
        """The template's pid, which is also its session."""
        return self._handle.pid

    @property
    def control(self) -> socket.socket:
        """The socket on which its reports arrive."""
        return self._handle.control

    @property
    def pidfd(self) -> int:
        """A descriptor that is readable once it has died."""
        return self._handle.pidfd

    @property
    def cleaning(self) -> bool:
        """Whether processes of a dead template are still to be killed and reaped."""
        return self._dead_session is not None

    @property
    def forks(self) -> bool:
        """Whether trainers are forks of it, and not new interpreters."""
        return self._hazard is None

    def send(self, packet: Packet, descriptors: Sequence[int] = ()) -> None:
        """Command the template. If it is dead or stuck, nothing is sent: its death is noticed, or caused, elsewhere."""
        try:
            template.send(self.control, packet, descriptors)
        except OSError as error:
            process_log().emit("template.deaf", error=str(error))
        if self._answer_by is None:
            self._answer_by = SYSTEM.monotonic() + _ANSWER_SECONDS

    def receive(self) -> list[Packet]:
        """Return what it has reported."""
        packets: list[Packet] = []
        while select.select([self.control], [], [], 0)[0]:
            try:
                received = template.receive(self.control)
            except OSError:
                received = None
            if received is None:
                break
            packet, _ = received
            if isinstance(packet, template.TemplateReady):
                self._handle.ready = True
                self._failed_starts = 0
            packets.append(packet)
        if packets:
            self._answer_by = None  # `check` waits anew for the answer still owed
        return packets

    def check(self, *, owes_answer: bool) -> None:
        """Kill a template that is ready and does not obey: it is stopped, or worse.

        This also keeps a second one in reserve. TrainerUnkillable where it has obeyed, and what it killed is still
        there.
        """
        self._keep_spare()
        self._look_for_survivors(owes_answer=owes_answer)
        if not owes_answer or not self._handle.ready:
            self._answer_by = None
        elif self._answer_by is None:
            self._answer_by = SYSTEM.monotonic() + _ANSWER_SECONDS
        elif SYSTEM.monotonic() > self._answer_by and not self._survivors:
            process_log().emit("template.stuck", pid=self.pid)
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
            self._answer_by = None

    def _look_for_survivors(self, *, owes_answer: bool) -> None:
        now = SYSTEM.monotonic()
        sessions = [self._dead_session, self._handle.pid if owes_answer else None]
        if not any(sessions):
            self._survivors.clear()
            return
        if now < self._looked_at + _SURVIVORS_SECONDS:
            return
        self._looked_at = now
        members = [pid for session in sessions if session is not None for pid in process.session_members(session)]
        present = survivors(members)
        self._survivors = {one.pid: self._survivors.get(one.pid, now) for one in present}
        for one in present:
            seconds = now - self._survivors[one.pid]
            if due(one, seconds):
                raise TrainerUnkillable(one, seconds)

    def replace(self) -> str:
        """Reap the dead template and replace it; return how it ended.

        TemplateLost after too many deaths, or where the machine starts no other.
        """
        ended = self._reap(self._handle)
        if not self._handle.ready:
            self._failed_starts += 1
        self._dead_session = self._handle.pid
        self.clean()
        if self._failed_starts >= _STARTS:
            raise TemplateLost(f"{ended}; it never got as far as calling elastic3d.run")
        try:
            self._handle = self._take_spare() or self._start()
        except OSError as error:
            raise TemplateLost(f"{ended}; another could not be started: {error}") from error
        self._answer_by = None
        self._spare_at = SYSTEM.monotonic() + SPARE_AFTER
        return ended

    def _take_spare(self) -> _Handle | None:
        """Return the second template, None if none is alive."""
        spare, self._spare = self._spare, None
        if spare is not None and _dead(spare):
            self._reap(spare)
            return None
        return spare

    def _keep_spare(self) -> None:
        """Start a second template, or replace one that died, once the first is ready."""
        if self._spare is not None and _dead(self._spare):
            self._spare_failed(self._reap(self._spare))
        due = self._hazard is None and self._handle.ready and SYSTEM.monotonic() >= self._spare_at
        if self._spare is None and due and self._spare_deaths < _STARTS:
            try:
                self._spare = self._start()
            except OSError as error:
                self._spare_failed(f"the template could not be started: {error}")

    def _spare_failed(self, detail: str) -> None:
        process_log().emit("template.spare_died", detail=detail)
        self._spare, self._spare_at = None, SYSTEM.monotonic() + SPARE_AFTER
        self._spare_deaths += 1

    def clean(self) -> bool:
        """Kill and reap what is left of the dead template's session; return whether nothing remains."""
        if self._dead_session is not None:
            process.kill_session(self._dead_session)
            if not process.session_members(self._dead_session):
                self._dead_session = None
        return self._dead_session is None

    def end(self) -> None:
        """Kill and reap the templates and everything in their sessions."""
        spare, self._spare = self._spare, None
        if spare is not None:
            # It has forked nothing.
            signal.pidfd_send_signal(spare.pidfd, signal.SIGKILL)
            self._reap(spare)
        if self._handle.pidfd >= 0:
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
            self._reap(self._handle)
        deadline = SYSTEM.monotonic() + _ANSWER_SECONDS
        self.clean()
        self._dead_session = self._handle.pid
        while not self.clean() and SYSTEM.monotonic() < deadline:
            members = process.session_members(self._dead_session)
            if members and set(members) <= set(self._survivors):
                break  # nothing but what SIGKILL does not end
            SYSTEM.sleep(0.002)

    def _fork(self, trainer_main: TrainerMain, *others: socket.socket) -> _Handle:
        pid, control = template.fork_template(trainer_main, others)
        return _Handle(pid=pid, control=control, pidfd=os.pidfd_open(pid), popen=None)

    def _start(self) -> _Handle:
        start = spawn.start_template if self._hazard is None else spawn.start_bare_template
        popen, control = start(self._script)
        return _Handle(pid=popen.pid, control=control, pidfd=os.pidfd_open(popen.pid), popen=popen)

    def _reap(self, handle: _Handle) -> str:
        if handle.popen is not None:
            code = handle.popen.wait()
        else:
            code = os.waitstatus_to_exitcode(os.waitpid(handle.pid, 0)[1])
        handle.control.close()
        os.close(handle.pidfd)
        handle.pidfd = -1
        return f"the template {describe_exit(code)}"


def _dead(handle: _Handle) -> bool:
    return bool(select.select([handle.pidfd], [], [], 0)[0])


def describe_exit(code: int) -> str:
    """Say in words how a process ended. code: the exit code, or minus a signal's number."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"

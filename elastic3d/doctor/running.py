"""Checks side by side: each within a time of its own, all within the whole, and none able to hang the command.

A check tells its findings as it makes them, so that what it found before it got stuck is not lost. It is asked to stop
when its time is over or the person gives up; it then removes what it made, for which it has `CLEANING` seconds. A
thread that does not even come back for that (a dead mount, a driver) is left behind, and what it made is named.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from elastic3d import threads
from elastic3d.clock import SYSTEM, Clock
from elastic3d.doctor.findings import NodeFinding, Subject, failure

CLEANING = 5.0
"""Seconds for a check that was asked to stop to remove what it made."""

TURN = 0.1
"""Seconds between two looks at how far the checks are."""


class Stopped(Exception):
    """The check is to end now: its time is over, or the person gave up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCheck:
    """Something to look at. run: measures and tells what it finds. limit: seconds for it."""

    subject: Subject
    name: str
    run: Callable[[CheckRun], None]
    limit: float


class CheckRun:
    """One check under way, as its own thread and the command both see it. Thread-safe."""

    def __init__(self, check: NodeCheck, limit: float, clock: Clock) -> None:
        self.check = check
        self._clock = clock
        self.limit = limit
        self.ends = clock.monotonic() + limit
        self.doing = ""
        self.done = threading.Event()
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._findings: list[NodeFinding] = []
        self._made: list[str] = []

    # For the check.

    @property
    def left(self) -> float:
        """Seconds until the check's time is over, 0 from then on."""
        return max(0.0, self.ends - self._clock.monotonic())

    def tell(self, *findings: NodeFinding) -> None:
        """Take note of what was found."""
        with self._lock:
            self._findings += findings

    def go_on(self, doing: str = "") -> None:
        """Say what comes next, for people; Stopped where the check is to end instead."""
        if doing:
            self.doing = doing
        if self._stop.is_set() or not self.left:
            raise Stopped

    def wait(self, seconds: float) -> None:
        """Let time pass; Stopped as soon as the check is to end."""
        self._stop.wait(min(seconds, self.left))
        self.go_on()

    def making(self, what: str) -> None:
        """Have `what` named to people from now on: it is about to be there, and has to be removed."""
        with self._lock:
            self._made.append(what)

    def removed(self, what: str) -> None:
        """Take note that it is not there any more."""
        with self._lock:
            self._made.remove(what)

    # For the command.

    @property
    def findings(self) -> tuple[NodeFinding, ...]:
        """What was found so far."""
        with self._lock:
            return tuple(self._findings)

    @property
    def made(self) -> tuple[str, ...]:
        """What is there at the moment and has to be removed."""
        with self._lock:
            return tuple(self._made)

    def stop(self) -> None:
        """Ask the check to end. May be called twice."""
        self._stop.set()


class CheckRuns:
    """All checks under way. limit: seconds for the whole, cleaning not counted."""

    def __init__(self, checks: Sequence[NodeCheck], *, limit: float, clock: Clock = SYSTEM) -> None:
        self._clock = clock
        self.runs = tuple(CheckRun(check, min(check.limit, limit), clock) for check in checks)
        for run in self.runs:
            threads.start(_run, run, name=f"doctor-{run.check.name}", edge=threads.Edge.ALONE)

    def wait(self, shown: Callable[[Sequence[CheckRun]], None] = lambda runs: None) -> tuple[NodeFinding, ...]:
        """Return what all checks found. A check that was not done in time adds a failure that says so."""
        while waiting := [run for run in self.runs if not run.done.is_set()]:
            now = self._clock.monotonic()
            for run in waiting:
                if now >= run.ends:
                    run.stop()
            if all(now >= run.ends + CLEANING for run in waiting):
                break
            shown(self.runs)
            waiting[0].done.wait(TURN)
        findings: list[NodeFinding] = []
        for run in self.runs:
            findings += run.findings
            if not run.done.is_set():
                findings.append(_hangs(run))
        return tuple(findings)

    def stop(self) -> tuple[str, ...]:
        """End all checks, wait a moment for them to remove what they made, and return what may be left."""
        for run in self.runs:
            run.stop()
        ends = self._clock.monotonic() + CLEANING
        for run in self.runs:
            run.done.wait(max(0.0, ends - self._clock.monotonic()))
        return self.made

    @property
    def made(self) -> tuple[str, ...]:
        """What is there at the moment and has to be removed."""
        return tuple(what for run in self.runs for what in run.made)

    @property
    def stuck(self) -> bool:
        """Whether some check never came back."""
        return any(not run.done.is_set() for run in self.runs)


def _run(run: CheckRun) -> None:
    try:
        run.check.run(run)
    except Stopped:
        run.tell(
            failure(
                run.check.subject,
                run.check.name,
                f"not done within {run.limit:g} s{f', at: {run.doing}' if run.doing else ''}",
                "something answers slowly or not at all; mend that, or give more time by --limit",
            )
        )
    except Exception as error:  # noqa: BLE001  # the edge of a check: what nobody foresaw is a finding too
        run.tell(
            failure(
                run.check.subject,
                run.check.name,
                f"the check itself failed{f', at {run.doing}' if run.doing else ''}: {type(error).__name__}: {error}",
                "look at what it was at; if that is well, report this",
            )
        )
    finally:
        for what in run.made:
            run.tell(failure(run.check.subject, run.check.name, f"{what} could not be removed", "remove it by hand"))
        run.done.set()


def _hangs(run: CheckRun) -> NodeFinding:
    left = "".join(f"; {what} may be left behind" for what in run.made)
    return failure(
        run.check.subject,
        run.check.name,
        f"no answer within {run.limit:g} s{f', at: {run.doing}' if run.doing else ''}{left}",
        "it hangs in the system: look at the mount, the driver or the name server that it waits for",
    )

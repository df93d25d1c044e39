"""Results of checks, and how checks run: side by side, each within a time limit, none able to bring the node down."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from elastic3d import threads
from elastic3d.clock import SYSTEM, Clock


class Unfit(Exception):
    """Raised by a check: what is wrong with this node, and what to do about it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """The result of one check. detail: what is wrong; if `ok`, a remark, "" for none."""

    name: str
    ok: bool
    detail: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A check to be made. run: returns a remark or "", raises Unfit. limit: seconds after which it has failed."""

    name: str
    run: Callable[[], str]
    limit: float


@dataclass(slots=True)
class _Running:
    work: Check
    thread: threading.Thread
    results: list[CheckResult] = field(default_factory=list)


def run_checks(works: Sequence[Check], *, clock: Clock = SYSTEM) -> tuple[CheckResult, ...]:
    """Make all checks at the same time and return their results, in order.

    One that does not return in time is left behind on its thread, which may hang in the kernel for ever, and reported.
    """
    begun = clock.monotonic()
    running = [_start(work, clock) for work in works]
    checks = []
    for one in running:
        one.thread.join(max(0.0, begun + one.work.limit - clock.monotonic()))
        late = f"no answer within {one.work.limit:g} s (`elastic3d doctor` on this node looks closer)"
        checks.append(
            one.results[0]
            if one.results
            else CheckResult(name=one.work.name, ok=False, detail=late, seconds=clock.monotonic() - begun)
        )
    return tuple(checks)


def _start(work: Check, clock: Clock) -> _Running:
    results: list[CheckResult] = []

    def run() -> None:
        begun = clock.monotonic()
        ok = False
        try:
            detail = work.run()
            ok = True
        except Unfit as error:
            detail = str(error)
        except Exception as error:  # noqa: BLE001  # drivers raise anything; whatever it is, it is the result
            detail = f"{type(error).__name__}: {error}"
        results.append(CheckResult(name=work.name, ok=ok, detail=detail, seconds=clock.monotonic() - begun))

    thread = threads.start(run, name=f"check-{work.name}", edge=threads.Edge.ALONE)
    return _Running(work, thread, results)

"""This machine's clock: does it go, is it kept right, and how far is it from those of others?

A job compares no clocks between hosts. Certificates, tokens and the signatures of object stores do.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from elastic3d.admission.check import Unfit
from elastic3d.admission.host import clock_goes
from elastic3d.clock import SYSTEM, Clock
from elastic3d.doctor.findings import NodeFinding, Subject, failure, ok, warning

FAR = 2.0
"""Seconds beyond which people are warned: logs of several nodes cannot be put in order any more."""

REFUSED = 900.0
"""Seconds off at which S3 refuses every request (RequestTimeTooSkewed)."""

_SET = "let it be set: chronyc makestep, or timedatectl set-ntp true"
_TIME_ERROR = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockReading:
    """How another clock stands to ours. offset: seconds by which ours is ahead, `within` so many either way."""

    against: str
    offset: float
    within: float


def reading(against: str, *, before: float, after: float, theirs: float, grain: float) -> ClockReading:
    """Return how another clock stands, which showed `theirs` between two looks at ours.

    grain: seconds in which the other one counts, of which it leaves off the rest.
    """
    return ClockReading(
        against=against,
        offset=(before + after) / 2 - (theirs + grain / 2),
        within=(after - before) / 2 + grain / 2,
    )


def judge(against: ClockReading) -> NodeFinding:
    """Say whether two clocks agree; what cannot be told apart from agreement is ok."""
    least = max(0.0, abs(against.offset) - against.within)
    way = "ahead of" if against.offset > 0 else "behind"
    name = f"against {against.against}"
    if least <= FAR:
        seen = f"agrees within {max(0.1, abs(against.offset) + against.within):.1f} s"
        return ok(Subject.CLOCK, name, seen)
    seen = f"{abs(against.offset):.1f} s {way} it (within {against.within:.1f} s)"
    if least > REFUSED:
        return failure(Subject.CLOCK, name, seen, f"{_SET}; object stores and TLS refuse a clock so far off")
    return warning(Subject.CLOCK, name, seen, f"{_SET}; or that machine's clock is wrong")


def judge_own(*, wrong: str, synchronised: bool | None, compared: bool) -> NodeFinding:
    """Say whether this machine's own clock can be trusted.

    wrong: what is wrong with how it goes, "" for nothing. synchronised: as the kernel says, None where it does not.
    compared: with a clock elsewhere, which is better proof.
    """
    if wrong:
        return failure(Subject.CLOCK, "own", wrong, _SET)
    if synchronised:
        return ok(Subject.CLOCK, "own", "goes, and the kernel has it synchronised")
    if compared:
        return ok(Subject.CLOCK, "own", "goes; the kernel does not say that it is synchronised")
    return warning(
        Subject.CLOCK,
        "own",
        "goes; nothing says that it is synchronised",
        "run chrony or another NTP client; with --endpoint or --store it is compared with theirs",
    )


def measure(clock: Clock = SYSTEM) -> tuple[str, bool | None]:
    """Return what is wrong with how the clock goes, "" for nothing, and whether the kernel has it synchronised."""
    try:
        return clock_goes(clock), kernel_synchronised()
    except Unfit as error:
        return str(error), None


def kernel_synchronised() -> bool | None:
    """Return whether the kernel counts the clock as synchronised (adjtimex(2)); None where it may not be asked."""
    state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.create_string_buffer(512))
    return None if state < 0 else state != _TIME_ERROR

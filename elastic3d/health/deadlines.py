"""How long a rank may be silent, from what it is at and from the longest gaps that its own steps have had: pure.

Deadlines follow activity: a rank that neither computes nor reads is given little time, one that does ten times as much.
Whoever waits for others in a collective says nothing about itself, however long; so it is named early, to have all
ranks' records together when a deadline of somebody else's passes.
"""

from __future__ import annotations

from dataclasses import dataclass

from elastic3d.health.options import Watching
from elastic3d.health.phases import Phase
from elastic3d.health.record import WARM, ProgressRecord
from elastic3d.membership.records import HealthFigures

BUSY = 10.0
"""How many times as long as an idle one a rank may be silent that computes or reads."""

IDLE_GAPS, BUSY_GAPS = 4.0, 8.0
"""Times the longest gap of its last steps."""

LONGER = {
    Phase.START: 600.0,  # as long as process groups wait for each other (`parallel.mesh.GROUP_TIMEOUT`)
    Phase.DATA: 30.0,
    Phase.COPY: 30.0,
    Phase.USER: 60.0,
    Phase.LEAVE: 60.0,
}
"""Least seconds of silence of an idle rank in phases where it does what cannot be seen from here."""

COLD_IDLE, COLD_BUSY = 60.0, 900.0
"""The same until a generation has made its first steps: they compile, allocate and connect."""

COLD_WAIT = 5.0
"""How many times as long as later a rank waits for others until then, before it is named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowance:
    """Seconds of silence: idle, busy; and named: after how many to name the rank to its node, judged or not."""

    idle: float
    busy: float
    named: float


def allowance(record: ProgressRecord, watching: Watching) -> Allowance:
    """Return how long a rank may be silent now."""
    stuck = watching.stuck
    if record.phase is Phase.PAUSE:
        return Allowance(idle=record.pause, busy=record.pause, named=record.pause)
    gap = record.longest.get(record.phase, 0.0) if record.wait is None else record.longest_wait
    least = stuck if record.wait is not None else max(stuck, LONGER.get(record.phase, 0.0))
    if record.phase is Phase.RESTORE and record.wait is None:
        least = max(stuck, watching.restore)
    idle, busy = max(least, IDLE_GAPS * gap), max(least, BUSY * stuck, BUSY_GAPS * gap)
    cold = record.made < WARM
    if cold:
        idle, busy = max(idle, COLD_IDLE), max(busy, COLD_BUSY)
    named = idle
    if record.wait is not None:
        named = min(idle, stuck * (COLD_WAIT if cold else 1.0))
    return Allowance(idle=idle, busy=busy, named=named)


def figures(watching: Watching | None) -> HealthFigures:
    """Return for people how long ranks may be silent at least, once they have made some steps: 0.0 for nobody looks."""
    if watching is None:
        return HealthFigures(idle=0.0, busy=0.0, acts=False)
    busy = BUSY * watching.stuck
    return HealthFigures(
        idle=watching.stuck,
        busy=busy,
        acts=watching.act,
        audit=watching.audit,
        at_rest=watching.at_rest,
        slow_from=watching.slow,
    )

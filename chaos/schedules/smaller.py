"""Smaller schedules than one that fails: with fewer faults, then with each of them milder."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from chaos.faults.fault import Fault
from chaos.faults.moment import When
from chaos.many.shrinking import shrink, with_less
from chaos.schedules.schedule import Schedule, check
from elastic3d.errors import UsageError

SHORTEST = 0.5
"""Seconds below which nothing is tried to be made shorter."""


def smaller(schedule: Schedule) -> Iterator[Schedule]:
    """Yield smaller schedules: without half of the faults, a quarter..., one; then with one of them milder."""
    for fewer in with_less(schedule.faults):
        if fewer:
            yield dataclasses.replace(schedule, faults=fewer)
    for at, fault in enumerate(schedule.faults):
        for milder in _milder(fault):
            faults = (*schedule.faults[:at], milder, *schedule.faults[at + 1 :])
            yield dataclasses.replace(schedule, faults=faults)


def _milder(fault: Fault) -> Iterator[Fault]:
    """Yield the fault for half as long, once instead of several times, and at a plainer moment."""
    seconds, times = getattr(fault, "seconds", 0.0), getattr(fault, "times", 1)
    milder: list[dict[str, Any]] = []
    if seconds > SHORTEST:
        milder.append({"seconds": max(SHORTEST, seconds / 2)})
    if times > 1:
        milder.append({"times": 1})
    plain = When(step=fault.when.step)
    if fault.when.step and fault.when != plain:
        milder.append({"when": plain})
    for values in milder:
        yield dataclasses.replace(fault, **values)


def smallest(
    failing: Schedule,
    fails: Callable[[Schedule], bool],
    *,
    tries: int,
    nodes: int,
    slots: int = 1,
    going: Callable[[], bool] = lambda: True,
) -> Schedule:
    """Return the last of a chain of smaller and smaller schedules that still fail.

    At most `tries` are tried, each once, and only what can happen to a job of so many nodes; none once it is not
    `going` any more.
    """
    tried = {failing.faults}

    def candidates(schedule: Schedule) -> Iterator[Schedule]:
        for one in smaller(schedule):
            if not going():
                return
            if one.faults in tried or not _possible(one, nodes, slots):
                continue
            tried.add(one.faults)
            yield one

    return shrink(failing, candidates, fails, tries=tries)


def _possible(schedule: Schedule, nodes: int, slots: int) -> bool:
    try:
        check(schedule.faults, nodes=nodes, slots=slots)
    except UsageError:
        return False
    return True

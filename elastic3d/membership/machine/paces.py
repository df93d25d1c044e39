"""Which machines are known to be slow: by the record of the sealed generation, and by what is found while it trains."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from elastic3d.membership.machine.situation import Situation
from elastic3d.membership.slowness import SpeedReport
from elastic3d.pace import Pace, slow_ones
from elastic3d.values import Node

DIGITS = 2
"""Decimals to which it is known how slow a machine is."""


def finding(situation: Situation) -> SpeedReport | None:
    """Return what was found in the sealed generation; None as long as nothing was.

    The node of rank 0 says it. Once that is gone, what this member heard of its own trainers is the same.
    """
    current = situation.view.generation
    if current is None or not current.nodes:
        return None
    report = situation.roster.reports.get(current.nodes[0].id)
    speeds = report.speeds if report is not None else situation.heard
    return speeds if speeds is not None and speeds.key == current.key else None


def known(situation: Situation) -> dict[str, Pace]:
    """Return what is known of machines that are slow, or for whose sake something was changed lately, by place.

    What was found of a node that trains replaces what the record has. Of one that does not train nothing is found: it
    stays slow as long as it is remembered that something was changed for its sake.
    """
    view = situation.view
    current = view.generation
    if current is None:
        return {}
    said = finding(situation)
    if not current.paces and (said is None or not said.slow):
        return {}
    seconds = max(0.0, situation.alarm.now - view.sealed_at)
    paces = {pace.place: pace.after(seconds) for pace in current.paces}
    if said is not None:
        for node in current.nodes:
            slow, before = said.slow.get(node.id), paces.get(node.place)
            if slow is not None or before is not None:
                rho = max(1.0, round(float(slow.rho), DIGITS)) if slow is not None else 1.0
                kind = slow.kind if slow is not None else ""
                paces[node.place] = Pace(
                    place=node.place, rho=rho, kind=kind, uses=before.uses if before is not None else 0.0
                )
    # One that the generation was formed for as slow may be well by now: the way back counts for it too.
    formed_for = slow_ones(current.paces)
    active = {node.place for node in current.nodes}
    return {
        place: pace
        for place, pace in paces.items()
        if pace.uses > 0.0 or (place in active and (pace.slow or place in formed_for))
    }


def speeds_of(nodes: Iterable[Node], paces: dict[str, Pace]) -> tuple[float, ...]:
    """Return the speed of each node in this order, as planners take it; () while they are alike."""
    speeds = tuple(paces[node.place].speed if node.place in paces else 1.0 for node in nodes)
    return speeds if any(speed < 1.0 for speed in speeds) else ()


def delay_of(nodes: Iterable[Node], paces: dict[str, Pace]) -> float:
    """Return how many times as long a step of these nodes takes for what no layout helps against: data, links."""
    return max((paces[node.place].delay for node in nodes if node.place in paces), default=1.0)


def slow_places(paces: dict[str, Pace], nodes: Sequence[Node]) -> dict[str, Pace]:
    """Return those of these nodes' machines that are slow, the slowest first."""
    slow = [paces[node.place] for node in nodes if node.place in paces and paces[node.place].slow]
    return {pace.place: pace for pace in sorted(slow, key=lambda pace: (-pace.rho, pace.place))}

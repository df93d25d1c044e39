"""In which steps there are audits while what one costs becomes known: pure functions of what all ranks agree on.

A plan of audits (`audit`) knows how many rounds an audited step has beyond its own, and takes a round for as long as
any other. Digests, comparisons and what is exchanged once more come on top of that, and a machine's memory may make a
round cheaper or dearer. So each rank measures by how much audited steps take longer than the steps before them, all
take the word of rank 0, which rides in a gather that audits make anyway, and the schedule follows after the audit: all
ranks, and their loaders, draw from the same one. No bits depend on it.

    cost        what an audited step takes longer, in steps
    every       from then on ceil(cost / budget)
    pause       until (audits held - 1) x cost is within the budget of the steps of this generation

What was held too often before it was known is so made up for: audits are never more than two ahead of their budget
from there on. A state that is saved has the cost in proportion to the plan's, so that generations that follow, of
whatever layout, begin with it.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass, replace

from elastic3d.health.audit import AuditPlan
from elastic3d.planner.extra_rounds import RAREST

LEAST = 3
"""Audits that have to be measured before their cost is taken for known."""

NEAREST = 8
"""Steps before an audited one with which it is compared; half as many are enough."""

KEPT = 9
"""Newest audits whose median counts: what else the machine does in one of them says nothing."""

NEAR = 0.8
"""Share of the budget that audits have to take at least for the schedule to stay as it is."""


class AuditTimes:
    """The seconds of the steps of one rank."""

    def __init__(self) -> None:
        self._plain: deque[float] = deque(maxlen=NEAREST)
        self._costs: deque[float] = deque(maxlen=KEPT)

    def made(self, seconds: float, *, audited: bool) -> None:
        """Take in a step."""
        if not audited:
            self._plain.append(seconds)
        elif 2 * len(self._plain) >= NEAREST:
            self._costs.append(seconds / statistics.median(self._plain) - 1.0)

    @property
    def cost(self) -> float | None:
        """By how much an audited step takes longer than others, as a share of one; None while that is not known."""
        return max(0.0, statistics.median(self._costs)) if len(self._costs) >= LEAST else None


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditSchedule:
    """The plans by which the steps of one generation are audited, each from its step on, oldest first.

    budget: the share of a step that audits may take. began: the first step of the generation. held: how many audits
    there were since. known: what one costs in proportion to what the plan takes it to cost, None while nobody measured
    it.
    """

    plans: tuple[tuple[int, AuditPlan], ...]
    budget: float
    began: int
    held: int = 0
    known: float | None = None

    def at(self, step: int) -> AuditPlan:
        """Return the plan that holds for a step."""
        return next(plan for first, plan in reversed(self.plans) if first <= step)

    @property
    def newest(self) -> AuditPlan:
        """The plan that holds for all that is to come."""
        return self.plans[-1][1]

    def after(self, step: int, cost: float | None) -> AuditSchedule:
        """Return the schedule once `step` was audited; the plans are the same ones unless they have to follow `cost`.

        cost: of an audited step as far as all know, None where it is not known.
        """
        plan, held = self.at(step), self.held + 1
        if cost is None or not plan.share:
            return replace(self, held=held)
        schedule = replace(self, held=held, known=cost / plan.share)
        end = step + plan.every - (step - plan.since) % plan.every
        since = max(end, self.began + _steps(self.held * cost, self.budget))
        if since == end and NEAR * plan.every * self.budget <= cost <= plan.every * self.budget:
            return schedule
        every = max(1, _steps(cost, self.budget))
        if (since, every) == (end, plan.every):
            return schedule
        following = replace(plan, every=every, since=since)
        return replace(schedule, plans=(*self.plans, (end, following)))


def begun(plan: AuditPlan, *, budget: float, step: int, known: float | None = None) -> AuditSchedule:
    """Return the schedule of a generation whose first step is `step`. known: as in the state that it goes on from."""
    if known is not None and plan.every:
        plan = replace(plan, every=max(1, _steps(known * plan.share, budget)))
    return AuditSchedule(plans=((0, plan),), budget=budget, began=step, known=known)


def _steps(cost: float, budget: float) -> int:
    """Return how many steps have this much of a budget."""
    return math.ceil(min(cost / budget, RAREST) - 1e-9)


class AuditTurns:
    """The schedule that a rank and its loader draw from. asked: the newest step that was loaded, or is about to be."""

    def __init__(self, schedule: AuditSchedule) -> None:
        self.schedule = schedule
        self.asked = -1

    def ask(self, step: int) -> AuditPlan:
        """Return the plan that holds for a step that is to be loaded, by any thread."""
        # Noted first: a schedule that follows is looked at after this, or what it was asked for is loaded anew.
        self.asked = max(self.asked, step)
        return self.schedule.at(step)

"""The input of the leader's decisions: one value for all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from elastic3d.membership.machine.alarm import Alarm
from elastic3d.membership.machine.leader_state import LeaderState
from elastic3d.membership.machine.roster import Roster
from elastic3d.membership.machine.view import View
from elastic3d.membership.policy import Policy
from elastic3d.membership.records import MemberRecord
from elastic3d.membership.stalls import Judge
from elastic3d.planner import Plan
from elastic3d.values import Layout

Planner = Callable[[int, MemberRecord, Layout | None], Plan]
"""(number of nodes, the leader's own record, the present layout) -> plan; raises LayoutError if none fits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """What a member that leads, or judges the leader, knows at one moment. Made for one decision and not kept."""

    view: View
    """What it knows of the job."""
    roster: Roster
    """The view's roster, which is there and listed."""
    policy: Policy
    """The numbers the job's owner chose."""
    planner: Planner
    """Finds the layout for a number of nodes."""
    judge: Judge | None = None
    """Finds out from stalls why nothing moves; None where nobody does."""
    leader_state: LeaderState
    """What the leader remembers between decisions; decisions write their notes into it."""
    alarm: Alarm
    """The moment, in the member's monotonic seconds, and when to be asked again."""

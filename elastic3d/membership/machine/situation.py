"""The input of the leader's decisions: one value for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from elastic3d.membership.machine.alarm import Alarm
from elastic3d.membership.machine.leader_state import LeaderState
from elastic3d.membership.machine.roster import Roster
from elastic3d.membership.machine.view import View
from elastic3d.membership.policy import Policy
from elastic3d.membership.records import MemberRecord
from elastic3d.membership.stalls import Judge
from elastic3d.planner import Plan
from elastic3d.values import Layout


class Planner(Protocol):
    """Finds the layout for a number of nodes."""

    def __call__(
        self, nodes: int, record: MemberRecord, present: Layout | None, speeds: Sequence[float] = (), /
    ) -> Plan:
        """Return the plan; LayoutError if none fits.

        record: the leader's own. speeds: of each node in rank order, as for `planner.plan`; () while none is slow.
        """
        ...


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

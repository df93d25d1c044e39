"""The input of the leader's decisions: one value for all of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from elastic3d.membership.machine.alarm import Alarm
from elastic3d.membership.machine.leader_state import LeaderState
from elastic3d.membership.machine.roster import Roster
from elastic3d.membership.machine.view import View
from elastic3d.membership.policy import Policy
from elastic3d.membership.records import MemberRecord
from elastic3d.membership.slowness import SpeedReport
from elastic3d.membership.stalls import Judge, Verdict
from elastic3d.planner import Plan
from elastic3d.shortfall import MemoryBound, Shortfall
from elastic3d.values import Generation, Layout, ModelProfile


class Planner(Protocol):
    """Finds the layout for a number of nodes."""

    def __call__(
        self,
        nodes: int,
        record: MemberRecord,
        present: Layout | None,
        speeds: Sequence[float] = (),
        bound: MemoryBound | None = None,
        counts: Collection[int] | None = None,
        /,
    ) -> Plan:
        """Return the plan; LayoutError if none fits.

        record: the leader's own. speeds: of each node in rank order, as for `planner.plan`; () while none is slow.
        bound: as for `planner.plan_below`, None where memory never ran out. counts: the numbers of nodes that may be
        active, None for any.
        """
        ...


class Ladder(Protocol):
    """Says what is done where memory ran out: `health.memory`. short: what was missing, by id of the node."""

    @property
    def acts(self) -> bool:
        """Whether it is done, or only reported."""
        ...

    def bounds(
        self, generation: Generation, profile: ModelProfile, short: Mapping[str, Shortfall], /
    ) -> Sequence[MemoryBound]:
        """Return below which bounds to look for a layout in place of this generation's, the one to begin with first."""
        ...

    def verdict(
        self,
        generation: Generation,
        profile: ModelProfile,
        short: Mapping[str, Shortfall],
        climbed: Generation | None,
        step: int,
        /,
    ) -> Verdict:
        """Return what is reported. climbed: the generation that needs less, None where there is none."""
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
    ladder: Ladder | None = None
    """Says what is done where memory ran out; None where nothing is."""
    heard: SpeedReport | None = None
    """The newest that its own trainers found of nodes' speeds."""
    leader_state: LeaderState
    """What the leader remembers between decisions; decisions write their notes into it."""
    alarm: Alarm
    """The moment, in the member's monotonic seconds, and when to be asked again."""

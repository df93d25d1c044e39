"""What a leader remembers between its decisions: what it waits for, and since when."""

from __future__ import annotations

from dataclasses import dataclass, field

from elastic3d.membership.machine.suspicions import Suspicions
from elastic3d.membership.records import SavedStep
from elastic3d.membership.stalls import Verdict
from elastic3d.planner.remedy import Rung
from elastic3d.shortfall import MemoryBound
from elastic3d.values import Generation


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedLoss:
    """A machine lost an incarnation, or its trainer died: one more on its count. `id` is new for each.

    stuck: or its ranks held all others up, which has a count of its own. lying: or a device of it computes wrongly,
    which needs no count.
    """

    id: str
    place: str
    stuck: bool = False
    lying: bool = False


@dataclass(slots=True, kw_only=True)
class Standstill:
    """What the leader found about the ranks of the generation `key` while they stand still.

    verdict: what holds now, None for nothing. asked_at, version: when the judge was asked last, and about which version
    of the stalls. due_at: when to look again, infinite while no stall stands; hears_from: from when on it may be asked
    after a time in which this leader did not run. concluded: all that it found, told once each; written: what of it was
    written though the generation goes on.
    """

    key: str = ""
    verdict: Verdict | None = None
    asked_at: float = float("-inf")
    due_at: float = float("inf")
    hears_from: float = float("-inf")
    version: int = -1
    concluded: list[Verdict] = field(default_factory=list)
    written: list[Verdict] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """Something that may be done about slow nodes, and the generation it leads to; None where it is only reported."""

    rung: Rung
    formed: Generation | None


@dataclass(slots=True, kw_only=True)
class Balance:
    """What the leader considers for the sake of machines that are slow, or well again, in the generation `key`.

    concerned: their places; since: since when they are. asked, remedies: on what knowledge the planner was asked last,
    and what came of it. failed: changes that were proposed and could not be made. proposed, verdict: the key of the
    newest one proposed, and what it was decided upon. reported: whether what is only reported was.
    """

    key: str = ""
    concerned: tuple[str, ...] = ()
    since: float = 0.0
    asked: object = None
    remedies: tuple[Remedy, ...] = ()
    failed: int = 0
    proposed: str = ""
    verdict: Verdict | None = None
    reported: bool = False


@dataclass(slots=True, kw_only=True)
class LeaderState:
    """One leadership. buried: the ids that this member has already buried, in whatever role; suspicions: whom it
    suspects, and since when; both are shared with the core.

    below: since when fewer nodes are there than may train; awaited: how many more are needed.
    unplanned: since when no layout is for those that are there; unfit: why, in the planner's words.
    leading: since when it leads without a gap in what it hears. proposed: since when the proposal stands. waiting:
    since when somebody waits for a planned change. considered: the roster's version that led to no planned change.
    lost_at: when the first loss of the sealed generation was seen. raised: since when some member's code is known to
    have raised where, so far, no other's has. apart: since when an active node is known that has to stand aside.
    losses: still to be counted; counted: all that are or were among them. drained: names buried because they were told
    to leave.
    committing: the newest save that the store was asked to commit and has not answered about; uncommitted: why the
    newest one that it answered about is no checkpoint, "" if it is one. ended: since when `main` has returned
    everywhere. rewritten: members for which the generation's record was written again, as a whole. able: since when
    everybody has been able to write. standstill: what was found about ranks that stand still. balance: about slow ones.
    bounded: the generation's key and what was missing on which node, and the bound that follows from it.
    sufficed: whether a generation can follow the sealed one with so many nodes, as far as it was asked.
    """

    buried: dict[str, None]
    leading: float = 0.0
    attempt: int = 0
    below: float | None = None
    awaited: int = 0
    unplanned: float | None = None
    unfit: str = ""
    orphan: float | None = None
    peer_lost: float | None = None
    proposed: float | None = None
    waiting: float | None = None
    lost_at: float | None = None
    ended: float | None = None
    raised: float | None = None
    apart: float | None = None
    able: float = float("-inf")
    not_before: float = 0.0
    considered: int = -1
    committing: SavedStep | None = None
    uncommitted: str = ""
    suspicions: Suspicions = field(default_factory=Suspicions)
    losses: list[CountedLoss] = field(default_factory=list)
    counted: dict[str, None] = field(default_factory=dict)
    drained: dict[str, None] = field(default_factory=dict)
    rewritten: dict[str, None] = field(default_factory=dict)
    standstill: Standstill = field(default_factory=Standstill)
    balance: Balance = field(default_factory=Balance)
    bounded: tuple[object, MemoryBound | None] | None = None
    sufficed: dict[int, bool] = field(default_factory=dict)
    _sealed: int = -1

    def next_attempt(self) -> int:
        """Return a number no other attempt of this job has.

        A leader counts from its token: tokens are etcd revisions, and each attempt costs a write, so that a later
        leader's token is beyond all numbers of the earlier ones.
        """
        self.attempt += 1
        return self.attempt

    def wait_longer(self, seconds: float, now: float) -> None:
        """Nobody could write for so many seconds: waits for others to register or report are prolonged by them.

        They have the whole time again to report why trainers stopped: the one that saw a death may be the one that
        could not write.
        """
        self.peer_lost = None
        self.able = now
        self.below = _later(self.below, seconds, now)
        self.unplanned = _later(self.unplanned, seconds, now)
        self.orphan = _later(self.orphan, seconds, now)
        self.proposed = _later(self.proposed, seconds, now)
        self.raised = _later(self.raised, seconds, now)
        self.apart = _later(self.apart, seconds, now)

    def turn_to(self, revision: int) -> None:
        """Forget the waits of an earlier generation, and what could follow it; `revision` is the record's."""
        if revision != self._sealed:
            self._sealed = revision
            self.sufficed.clear()
            self.below = self.unplanned = self.orphan = self.peer_lost = None
            self.proposed = self.waiting = self.lost_at = self.raised = self.apart = self.ended = None


def _later(since: float | None, seconds: float, now: float) -> float | None:
    """Return the beginning of a wait of which so many seconds do not count."""
    return None if since is None else min(now, since + seconds)

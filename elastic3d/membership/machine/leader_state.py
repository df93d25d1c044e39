"""What a leader remembers between its decisions: since when it waits for what."""

from __future__ import annotations

from dataclasses import dataclass, field

from elastic3d.membership.machine.suspicions import Suspicions
from elastic3d.membership.records import SavedStep


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedLoss:
    """A machine lost an incarnation, or its trainer died: one more on its count. `id` is new for each."""

    id: str
    place: str


@dataclass(slots=True, kw_only=True)
class LeaderState:
    """One leadership. buried: whom this member has buried already, in whatever role; suspicions: whom it suspects since
    when; both are shared with the core.

    below: since when fewer nodes are there than may train; awaited: how many more it takes.
    leading: since when it leads without a gap in what it hears. proposed: since when the proposal stands. waiting:
    since when somebody waits for a planned change. considered: the roster's version of which no planned change came.
    lost_at: when the first loss of the sealed generation was seen. raised: since when somebody's code is known to have
    raised where, so far, no other's did. apart: since when an active node is known that has to stand aside. losses:
    still to be counted; counted: all that are or were among them. drained: names buried because they were told to
    leave.
    committing: the newest save that the store was asked to commit and has not answered for; uncommitted: why the newest
    one that it answered for is no checkpoint, "" where it is one. ended: since when `main` has returned everywhere.
    rewritten: members for whom the generation's record was written again, as a whole.
    """

    buried: dict[str, None]
    leading: float = 0.0
    attempt: int = 0
    below: float | None = None
    awaited: int = 0
    unplanned: float | None = None
    orphan: float | None = None
    peer_lost: float | None = None
    proposed: float | None = None
    waiting: float | None = None
    lost_at: float | None = None
    ended: float | None = None
    raised: float | None = None
    apart: float | None = None
    not_before: float = 0.0
    considered: int = -1
    committing: SavedStep | None = None
    uncommitted: str = ""
    suspicions: Suspicions = field(default_factory=Suspicions)
    losses: list[CountedLoss] = field(default_factory=list)
    counted: dict[str, None] = field(default_factory=dict)
    drained: dict[str, None] = field(default_factory=dict)
    rewritten: dict[str, None] = field(default_factory=dict)
    _sealed: int = -1

    def next_attempt(self) -> int:
        """Return a number no other attempt of this job has.

        A leader counts from its token: tokens are etcd revisions, and each attempt costs a write, so that a later
        leader's token is beyond all numbers of the earlier ones.
        """
        self.attempt += 1
        return self.attempt

    def wait_longer(self, seconds: float, now: float) -> None:
        """Nobody could write for so long: that time does not count for what others were waited for to register or say.

        Why trainers stopped they have the whole time to say again: who saw a death may have been the one that waited.
        """
        self.peer_lost = None
        self.below = _later(self.below, seconds, now)
        self.unplanned = _later(self.unplanned, seconds, now)
        self.orphan = _later(self.orphan, seconds, now)
        self.proposed = _later(self.proposed, seconds, now)
        self.raised = _later(self.raised, seconds, now)
        self.apart = _later(self.apart, seconds, now)

    def turn_to(self, revision: int) -> None:
        """Forget what was waited for in an earlier generation; `revision` is the record's."""
        if revision != self._sealed:
            self._sealed = revision
            self.below = self.unplanned = self.orphan = self.peer_lost = None
            self.proposed = self.waiting = self.lost_at = self.raised = self.apart = self.ended = None


def _later(since: float | None, seconds: float, now: float) -> float | None:
    """Return the beginning of a wait of which so many seconds do not count."""
    return None if since is None else min(now, since + seconds)

"""What a member hears: the news of etcd and of its own adapters, as plain frozen values."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from elastic3d.membership.actions import Write
from elastic3d.membership.records import (
    Claim,
    Doubt,
    Drain,
    End,
    Flap,
    MemberRecord,
    Notice,
    Proposal,
    Quarantine,
    Report,
    SavedStep,
    Tomb,
)
from elastic3d.values import Generation

# News of the roster, for the leader and for who must judge it. `id` is `Node.id`, name@incarnation.


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberPut:
    """A member key was written; `order` is its create revision: who came first."""

    record: MemberRecord
    order: int
    revision: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberGone:
    """A member key vanished. Without a tomb that is a lost lease: suspicion, not death."""

    id: str
    revision: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportPut:
    """A member's report was written."""

    id: str
    report: Report
    revision: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportGone:
    """A member's report vanished with its lease."""

    id: str
    revision: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainPut:
    """An operator wants this node, by name, to leave."""

    name: str
    drain: Drain
    revision: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainGone:
    """The operator took it back, or it was done."""

    name: str
    revision: int


@dataclass(frozen=True, slots=True, kw_only=True)
class QuarantinePut:
    """This machine, by `Node.place`, is kept out."""

    place: str
    quarantine: Quarantine
    revision: int


@dataclass(frozen=True, slots=True, kw_only=True)
class QuarantineGone:
    """The machine was released, or its time is over."""

    place: str
    revision: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FlapPut:
    """How often this machine was lost lately."""

    place: str
    flap: Flap
    revision: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FlapGone:
    """The machine behaved long enough to be forgotten."""

    place: str
    revision: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreadable:
    """A member's own record is garbage or of a newer schema: it cannot take part, and nobody else is disturbed."""

    id: str
    detail: str
    revision: int


# News of the board, for everybody.


@dataclass(frozen=True, slots=True, kw_only=True)
class TombPut:
    """An incarnation is out."""

    id: str
    tomb: Tomb
    revision: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TombGone:
    """An old tomb was cleared away."""

    id: str
    revision: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DoubtPut:
    """Somebody does not hear this incarnation."""

    id: str
    doubt: Doubt
    revision: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DoubtGone:
    """The doubt was settled, or its author is gone."""

    id: str
    revision: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaderPut:
    """Somebody leads; the revision is the fencing token."""

    claim: Claim
    revision: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaderGone:
    """Nobody leads. token: the revision of what stands under the leader's key nevertheless, 0 for nothing."""

    revision: int
    token: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationPut:
    """A generation was sealed."""

    generation: Generation
    revision: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationSpoiled:
    """Somebody deleted the generation's record (`stands` 0), or wrote garbage over it, of this revision."""

    revision: int
    stands: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProposalPut:
    """A generation is being prepared."""

    proposal: Proposal
    revision: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProposalGone:
    """The proposal was sealed or withdrawn."""

    revision: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EndPut:
    """The job is over."""

    end: End
    revision: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Garbage:
    """What stands under this key, below the run's root, is no record, and in the way of those that would."""

    key: str
    revision: int


OfRoster = (
    MemberPut
    | MemberGone
    | ReportPut
    | ReportGone
    | DrainPut
    | DrainGone
    | QuarantinePut
    | QuarantineGone
    | FlapPut
    | FlapGone
    | Unreadable
    | Garbage
)
OfBoard = (
    TombPut
    | TombGone
    | DoubtPut
    | DoubtGone
    | LeaderPut
    | LeaderGone
    | GenerationPut
    | GenerationSpoiled
    | ProposalPut
    | ProposalGone
    | EndPut
    | Garbage
)


class Tier(StrEnum):
    """Which half of the keys a listing is of."""

    BOARD = "board"
    ROSTER = "roll"


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """All of one tier, read at one revision: at the start, or after a gap in its watch.

    rolled_back: etcd lost what it had told before, having come back empty or from a backup; revisions known from before
    mean nothing any more.
    """

    tier: Tier
    items: tuple[OfRoster | OfBoard, ...]
    revision: int
    gap: bool = True
    rolled_back: bool = False


# What the own adapters say.


@dataclass(frozen=True, slots=True, kw_only=True)
class Registered:
    """The own member key stands in etcd."""

    revision: int


@dataclass(frozen=True, slots=True)
class Unregistered:
    """The own lease is lost, or the own key was found missing: register again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdLost:
    """No endpoint answers, and none has since this monotonic time; `reason` is for people."""

    since: float
    reason: str = ""


@dataclass(frozen=True, slots=True)
class EtcdBack:
    """etcd answers again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdImpaired:
    """etcd answers, but takes no writes from us until somebody mends what `reason` says; "": it takes them again."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactionRefused:
    """etcd will not compact the past of its keys until somebody mends what `reason` says; "": it did again."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRefused:
    """The peer's host refuses the heartbeat connection, or another process answers there: its keeper is dead.

    A second neighbour has found the same, where there is one to ask (`driver/witness.py`).
    """

    id: str
    evidence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerHeard:
    """A neighbour on the ring is heard, or (`alive=False`) has been silent for too long, in either direction."""

    id: str
    alive: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Probed:
    """What came of an `actions.Probe`: with these ids a connection could be made, or was refused; with those not."""

    reached: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainersPrepared:
    """All own trainers of this generation are built and wait."""

    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """All own trainers left after `step`, and their last snapshot is safe: in the store where nobody takes over."""

    key: str
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MainFinished:
    """`main` returned on all own slots."""

    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerFailed:
    """An own trainer failed: the script raised (`error=True`), or it ended in another way that nobody asked for.

    final: trying again cannot mend it.
    """

    key: str
    detail: str
    error: bool = False
    final: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerLostPeer:
    """An own trainer lost a peer and stopped, which is no failure of its own; somebody else knows why.

    detail: what its collective said, one line.
    """

    key: str
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReported:
    """A step was made. `etcd_away`: in its vote every member had lost etcd.

    safe: the newest step that all ranks hold at home and at their buddies, -1 for none.
    """

    step: int
    etcd_away: bool
    safe: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """All own slots wrote their tiles of this step to the store."""

    saved: SavedStep


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """A save that this leader had committed is a checkpoint, or with an error never will be."""

    saved: SavedStep
    error: str = ""


@dataclass(frozen=True, slots=True)
class LeaveAsked:
    """This node leaves the job now, with whatever its trainers are doing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Noticed:
    """This node has to leave soon: the cloud, a scheduler or a signal said so. It becomes a drain."""

    notice: Notice


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken:
    """This member cannot take part any longer: etcd refuses it, or a record it must obey cannot be read."""

    detail: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteDone:
    """A write a leader asked for was answered; when it failed, somebody else was faster."""

    write: Write
    ok: bool


Event = (
    OfRoster
    | OfBoard
    | Listed
    | Registered
    | Unregistered
    | EtcdLost
    | EtcdBack
    | EtcdImpaired
    | CompactionRefused
    | PeerRefused
    | PeerHeard
    | Probed
    | TrainersPrepared
    | Left
    | MainFinished
    | TrainerFailed
    | TrainerLostPeer
    | StepReported
    | Saved
    | Settled
    | LeaveAsked
    | Noticed
    | Broken
    | Tick
    | WriteDone
)

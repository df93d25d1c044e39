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

# News of the roster, for the leader and for members that must judge it. `id` is `Node.id`, name@incarnation.


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberPut:
    """A member key was written; `order` is its create revision, which says who came first."""

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
    """The machine's losses were long enough ago to be forgotten."""

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
    """Nobody leads. token: the revision of whatever is under the leader's key all the same, 0 for nothing."""

    revision: int
    token: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationPut:
    """A generation was sealed."""

    generation: Generation
    revision: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationSpoiled:
    """Somebody deleted the generation's record (`stands` 0), or overwrote it with garbage of that revision."""

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
    """The value under this key, below the run's root, is not a record, and is in the way of one."""

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

    rolled_back: etcd came back empty or from a backup, and lost what it had reported before; revisions known from
    before mean nothing any more.
    """

    tier: Tier
    items: tuple[OfRoster | OfBoard, ...]
    revision: int
    gap: bool = True
    rolled_back: bool = False


# News of this member's own adapters.


@dataclass(frozen=True, slots=True, kw_only=True)
class Registered:
    """This member's key is in etcd."""

    revision: int


@dataclass(frozen=True, slots=True)
class Unregistered:
    """This member's lease is lost, or its key was found missing: register again."""


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
    """etcd will not compact the past of its keys until somebody mends what `reason` says; "": it does again."""

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
    """The outcome of an `actions.Probe`: the ids to which a connection was made or refused, and those where neither."""

    reached: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainersPrepared:
    """All of this node's trainers of this generation are built and wait."""

    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """All of this node's trainers left after `step`; their last snapshot is safe, in the store if nobody takes over."""

    key: str
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MainFinished:
    """`main` returned on all of this node's slots."""

    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerFailed:
    """A trainer of this node died (`error=False`) or the user's code raised (`error=True`).

    final: trying again cannot mend it.
    """

    key: str
    detail: str
    error: bool = False
    final: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerLostPeer:
    """A trainer of this node lost a peer and stopped; somebody else knows why. detail: the collective's error."""

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
    """All of this node's slots wrote their tiles of this step to the store."""

    saved: SavedStep


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """A save that this leader wanted committed is a checkpoint or, with an error, never will be."""

    saved: SavedStep
    error: str = ""


@dataclass(frozen=True, slots=True)
class LeaveAsked:
    """This node leaves the job now, whatever its trainers are doing."""


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

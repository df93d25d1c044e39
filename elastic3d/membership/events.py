"""What a member hears: what etcd's keys tell (`key_events`) and its own adapters, as plain frozen values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from elastic3d.membership.actions import Write
from elastic3d.membership.key_events import (
    DoubtGone,
    DoubtPut,
    DrainGone,
    DrainPut,
    EndPut,
    FaultOrdered,
    FlapGone,
    FlapPut,
    Garbage,
    GenerationPut,
    GenerationSpoiled,
    LeaderGone,
    LeaderPut,
    Listed,
    MemberGone,
    MemberPut,
    OfBoard,
    OfRoster,
    ProposalGone,
    ProposalPut,
    QuarantineGone,
    QuarantinePut,
    ReportGone,
    ReportPut,
    StallGone,
    StallPut,
    Tier,
    TombGone,
    TombPut,
    Unreadable,
)
from elastic3d.membership.records import Notice, SavedStep
from elastic3d.membership.slowness import Slowness
from elastic3d.membership.stalls import Stall
from elastic3d.rollback import Rollback
from elastic3d.shortfall import Shortfall

__all__ = [
    "Broken",
    "CompactionRefused",
    "DoubtGone",
    "DoubtPut",
    "DrainGone",
    "DrainPut",
    "EndPut",
    "EtcdBack",
    "EtcdImpaired",
    "EtcdLost",
    "Event",
    "FaultOrdered",
    "FlapGone",
    "FlapPut",
    "Garbage",
    "GenerationPut",
    "GenerationSpoiled",
    "LeaderGone",
    "LeaderPut",
    "LeaveAsked",
    "Left",
    "Listed",
    "MainFinished",
    "MemberGone",
    "MemberPut",
    "NodesSlow",
    "Noticed",
    "OfBoard",
    "OfRoster",
    "PeerHeard",
    "PeerRefused",
    "Probed",
    "ProposalGone",
    "ProposalPut",
    "QuarantineGone",
    "QuarantinePut",
    "RanksMoving",
    "RanksSilent",
    "Registered",
    "ReportGone",
    "ReportPut",
    "Saved",
    "Settled",
    "StallGone",
    "StallPut",
    "StepReported",
    "Tick",
    "Tier",
    "TombGone",
    "TombPut",
    "TrainerFailed",
    "TrainerLostPeer",
    "TrainersPrepared",
    "Unreadable",
    "Unregistered",
    "WriteDone",
]


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
    """A trainer of this node failed: the script raised (`error=True`), or it ended and nobody had asked it to.

    final: trying again cannot mend it. out_of_memory: what was raised says that memory ran out, or the kernel killed it
    for that; short: what was missing. clean: it ended because this node was found to have computed wrongly, and audits
    vouch for steps up to this one; -1 otherwise. accused: this node's id with its machine, if it was convicted of that
    by the word of ranks on other nodes, and it was no accident.
    """

    key: str
    detail: str
    error: bool = False
    final: bool = False
    out_of_memory: bool = False
    short: Shortfall | None = None
    clean: int = -1
    accused: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerLostPeer:
    """A trainer of this node lost a peer and stopped, which is no failure of its own; somebody else knows why.

    detail: the collective's error. clean: the newest step that audits vouch for, if a device of another node was
    convicted and that is why; -1 otherwise. rollback: or the loss jumped up, and the run goes back for it; `clean` is
    the newest step then whose state it may go back to. accused: machines of the nodes whose devices were convicted, by
    id.
    """

    key: str
    detail: str = ""
    clean: int = -1
    rollback: Rollback | None = None
    accused: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReported:
    """A step was made. `etcd_away`: in its vote every member had lost etcd.

    safe: the newest step that all ranks hold at home and at their buddies, -1 for none.
    """

    step: int
    etcd_away: bool
    safe: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksSilent:
    """A trainer of this node has made no progress for longer than it may, or ended in a way that others may explain.

    Told again when something about it has changed. A stall of another generation than the sealed one says nothing.
    """

    stall: Stall


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksMoving:
    """All of this node's trainers of this generation make progress again."""

    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesSlow:
    """Which nodes of the running generation `key` are slow, by id, as of `step`; none are while `slow` is empty.

    Every node whose trainers run in the generation hears the same. Told in each generation as soon as enough of its
    steps were looked at, also if no node is slow, since what was known of an earlier one holds until then; and again
    whenever a node becomes slow, is well again, or is slower or faster than was told by more than a tenth. Of another
    generation than the sealed one it says nothing.
    """

    key: str
    step: int
    slow: Mapping[str, Slowness]


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
    | RanksSilent
    | RanksMoving
    | NodesSlow
    | Saved
    | Settled
    | LeaveAsked
    | Noticed
    | Broken
    | Tick
    | WriteDone
)

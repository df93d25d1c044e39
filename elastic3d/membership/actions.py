"""What a member does about what it hears: writes to etcd, and all else its owner has to do, as plain frozen values."""

from __future__ import annotations

from dataclasses import dataclass, field

from elastic3d.membership.records import (
    Doubt,
    End,
    Flap,
    GenerationHistory,
    MemberRecord,
    Proposal,
    Quarantine,
    Report,
    SavedStep,
    Tomb,
)
from elastic3d.values import Generation

# Writes. Those of `FENCED` are a leader's, and fail when it is none any more; the others may be sent again at will.


@dataclass(frozen=True, slots=True, kw_only=True)
class PutMember:
    """Register under the own lease (again, if it was lost); refused where the own tomb stands."""

    record: MemberRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class PutReport:
    """Write the own report; refused where the own tomb stands."""

    report: Report


@dataclass(frozen=True, slots=True, kw_only=True)
class Bury:
    """Delete the keys of this incarnation and put up its tomb, unless one stands already.

    missing: nor while it is registered, for that it is not is all that is held against it. Etcd knows; a watch may lag.
    """

    id: str
    tomb: Tomb
    missing: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PutDoubt:
    """Ask an incarnation through etcd whether it lives."""

    id: str
    doubt: Doubt


@dataclass(frozen=True, slots=True, kw_only=True)
class Campaign:
    """Take the lead if the leader key still has this mod revision (0: does not exist). Fenced."""

    expected: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Seal:
    """Write the generation record and its history, fenced on the leader's token and the record's revision.

    base: the generation that stands under the record's key at its revision `previous`; None for none, or no record.
    """

    generation: Generation
    history: GenerationHistory
    token: int
    previous: int
    base: Generation | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Propose:
    """Write the proposal, fenced like a seal."""

    proposal: Proposal
    token: int
    previous: int
    base: Generation | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Withdraw:
    """Delete the proposal, fenced on the leader's token."""

    token: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PutEnd:
    """End the job, fenced on the leader's token."""

    end: End
    token: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PutQuarantine:
    """Keep a machine out for a time, fenced on the leader's token."""

    place: str
    quarantine: Quarantine
    token: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PutFlap:
    """Remember for `seconds` that a machine was lost, fenced on the leader's token."""

    place: str
    flap: Flap
    seconds: float
    token: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Clear:
    """Delete what is done with - old tombs and doubts by id, drains by name - fenced on the leader's token."""

    tombs: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()
    drains: tuple[str, ...] = ()
    token: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Mend:
    """Write the sealed generation's record again, over garbage or with what was found out; fenced like a seal."""

    generation: Generation
    token: int
    previous: int
    base: Generation | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """Delete garbage, if it still is what stood there at `revision`; fenced on the leader's token."""

    key: str
    revision: int
    token: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PutSecret:
    """Write the run's secret again, if its key still has this mod revision (0: does not exist)."""

    secret: str = field(repr=False)
    revision: int


# Everything else a member does.


@dataclass(frozen=True, slots=True, kw_only=True)
class RingPeer:
    """A neighbour on the ring: whom to connect to, and by which identity to know it."""

    id: str
    address: str
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchPeers:
    """Hold heartbeat connections to `peers`, expect some from `expected` (ids), and none to or from anybody else.

    near: where those expected are, to try them once when another neighbour is refused by them.
    """

    peers: tuple[RingPeer, ...]
    expected: tuple[str, ...] = ()
    near: tuple[RingPeer, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Try to connect to each of these, once, and tell what came of it (`events.Probed`)."""

    peers: tuple[RingPeer, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreachable:
    """This node's trainers stand still, and these ids are all that it cannot connect to; () for nobody any more."""

    ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class WatchRoll:
    """Begin, or cease, to watch the roll."""

    on: bool


@dataclass(frozen=True, slots=True)
class LetGo:
    """Keep the own lease alive no longer: this member hears nothing, and the others shall not count on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepare:
    """Fork trainers for this generation and let them build everything."""

    generation: Generation


@dataclass(frozen=True, slots=True, kw_only=True)
class StartTrainers:
    """The generation is sealed: its prepared trainers restore and train."""

    generation: Generation


@dataclass(frozen=True, slots=True, kw_only=True)
class AskLeave:
    """Tell the trainers of this generation to leave at the next boundary all agree on."""

    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """Kill the trainers of this generation."""

    key: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Fence:
    """This member leads generation `number`: put the number into the store's `latest`, against older leaders."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """This member leads generation `number`: commit this step's checkpoint if its manifests are complete."""

    saved: SavedStep
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Awaiting:
    """This member leads, and so many more nodes have to come before the job can train; 0: it waits for none."""

    nodes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Draining:
    """This node is to leave within `seconds` (None: at leisure): secure what it alone holds."""

    seconds: float | None
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """This member is over. rejoin: the job goes on and would take this node as a newcomer, under a new incarnation."""

    failed: bool
    detail: str = ""
    rejoin: bool = False


Unfenced = PutMember | PutReport | Bury | PutDoubt | PutSecret
Fenced = Campaign | Seal | Propose | Withdraw | PutEnd | PutQuarantine | PutFlap | Clear | Mend | Sweep
Write = Unfenced | Fenced
Local = (
    WatchPeers
    | Probe
    | Unreachable
    | WatchRoll
    | LetGo
    | Prepare
    | StartTrainers
    | AskLeave
    | Stop
    | Fence
    | Commit
    | Awaiting
    | Draining
    | Exit
)
Action = Write | Local

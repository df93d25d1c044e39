"""What a member does about what it hears: writes to etcd, and all else its owner has to do, as plain frozen values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from elastic3d.distrust import Distrust
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
from elastic3d.membership.stalls import Stall, Verdict
from elastic3d.values import Generation

# Writes. Those of `Fenced` are a leader's and fail once it no longer leads; the others may be sent again at will.


@dataclass(frozen=True, slots=True, kw_only=True)
class PutMember:
    """Register under this member's own lease (again, if it was lost); refused where its tomb stands."""

    record: MemberRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class PutReport:
    """Write this member's report; refused where its tomb stands."""

    report: Report


@dataclass(frozen=True, slots=True, kw_only=True)
class PutStall:
    """Write what this member says of its ranks that stand still; refused where its tomb stands."""

    stall: Stall


@dataclass(frozen=True, slots=True)
class DropStall:
    """Take it back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bury:
    """Delete the keys of this incarnation and put up its tomb, unless one stands already.

    missing: nor while it is registered, since its absence is the only evidence. Etcd knows; a watch may lag.
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
    verdict: what the generation that ends was found to suffer from, written beside. standing: (id, created) of stalls
    it rests on: if one of them was taken back meanwhile nothing is sealed.
    """

    generation: Generation
    history: GenerationHistory
    token: int
    previous: int
    base: Generation | None = None
    verdict: Verdict | None = None
    standing: tuple[tuple[str, int], ...] = ()


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
    """End the job, fenced on the leader's token. verdict, standing: as for `Seal`. term: that of etcd's own leader."""

    end: End
    token: int
    term: int = 0
    verdict: Verdict | None = None
    standing: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PutVerdict:
    """Write what the sealed generation was found to suffer from, though it goes on; fenced on the leader's token."""

    verdict: Verdict
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
    """Delete what is no longer needed - old tombs and doubts by id, drains by name - fenced on the leader's token."""

    tombs: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()
    drains: tuple[str, ...] = ()
    token: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Mend:
    """Write the sealed generation's record again, over garbage or with what was learnt since; fenced like a seal."""

    generation: Generation
    token: int
    previous: int
    base: Generation | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """Delete garbage, unless its key has changed since `revision`; fenced on the leader's token."""

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
    """A neighbour on the ring: where to connect, and which identity to expect there."""

    id: str
    address: str
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchPeers:
    """Hold heartbeat connections to `peers`, expect some from `expected` (ids), and none to or from anybody else.

    near: where the expected ones are, to try each once when another neighbour is refused by it.
    """

    peers: tuple[RingPeer, ...]
    expected: tuple[str, ...] = ()
    near: tuple[RingPeer, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Try to connect to each of these, once, and report the outcome (`events.Probed`)."""

    peers: tuple[RingPeer, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreachable:
    """This node's trainers stand still, and it cannot connect to these ids; () when there are none any more."""

    ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class WatchRoster:
    """Begin, or cease, to watch the roster."""

    on: bool


@dataclass(frozen=True, slots=True)
class LetGo:
    """Let this member's lease run out: it hears nothing, and the others shall not count on it."""


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
    """This member leads generation `number`: put the number into the store's `latest`, against older leaders.

    distrusted: rules that the store is to have too, for jobs that know nothing of this one.
    """

    number: int
    distrusted: tuple[Distrust, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """This member leads generation `number`: commit this step's checkpoint if its manifests are complete."""

    saved: SavedStep
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Awaiting:
    """This member leads, and this many more nodes have to come before the job can train; 0: it waits for none.

    why: the planner's words, where those that are there are enough and no layout is for so many; "" otherwise.
    """

    nodes: int
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Concluded:
    """This member leads, and its judge found this from the stalls of these nodes, by id. Each finding comes once."""

    verdict: Verdict
    stalls: Mapping[str, Stall]


@dataclass(frozen=True, slots=True, kw_only=True)
class Draining:
    """This node is to leave within `seconds` (None: at leisure): secure what it alone holds."""

    seconds: float | None
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """This member's part is over. rejoin: the job goes on and would take this node back, under a new incarnation."""

    failed: bool
    detail: str = ""
    rejoin: bool = False


Unfenced = PutMember | PutReport | PutStall | DropStall | Bury | PutDoubt | PutSecret
Fenced = Campaign | Seal | Propose | Withdraw | PutEnd | PutVerdict | PutQuarantine | PutFlap | Clear | Mend | Sweep
Write = Unfenced | Fenced
Local = (
    WatchPeers
    | Probe
    | Unreachable
    | WatchRoster
    | LetGo
    | Prepare
    | StartTrainers
    | AskLeave
    | Stop
    | Fence
    | Commit
    | Awaiting
    | Concluded
    | Draining
    | Exit
)
Action = Write | Local


def replaces(newer: Write, older: Write) -> bool:
    """Return whether a write leaves nothing of the one before it, which need not be sent then."""
    stalls = PutStall | DropStall
    reports = isinstance(newer, PutReport) and isinstance(older, PutReport)
    return reports or (isinstance(newer, stalls) and isinstance(older, stalls))

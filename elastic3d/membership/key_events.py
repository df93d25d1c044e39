"""What the keys of etcd tell a member: one event for each change of a record, and listings of many."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from elastic3d.membership.injection import FaultOrder
from elastic3d.membership.records import (
    Claim,
    Doubt,
    Drain,
    End,
    Flap,
    MemberRecord,
    Proposal,
    Quarantine,
    Report,
    Tomb,
)
from elastic3d.membership.stalls import Stall
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
class StallPut:
    """A node's ranks stand still. `created`: the revision since which its stall stands without a break."""

    id: str
    stall: Stall
    created: int
    revision: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StallGone:
    """They move again, or the node's lease is over."""

    id: str
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
class FaultOrdered:
    """Somebody wants a fault of this incarnation's own processes, or it has answered. key, lease: of the order."""

    id: str
    order: FaultOrder
    key: str
    lease: int
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
    | StallPut
    | StallGone
    | Unreadable
    | Garbage
)
OfBoard = (
    TombPut
    | TombGone
    | DoubtPut
    | DoubtGone
    | FaultOrdered
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

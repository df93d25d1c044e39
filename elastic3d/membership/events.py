"""What a member hears (events) and what it does about it (actions). All are plain frozen values."""

from __future__ import annotations

from dataclasses import dataclass, field

from elastic3d.membership.records import Claim, End, MemberRecord, Proposal, Report, SavedStep, Tomb
from elastic3d.values import Generation


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberPut:
    """A member key was written; `order` is its create revision: who came first."""

    record: MemberRecord
    order: int
    revision: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberGone:
    """A member key vanished. Without a tomb that is a lost lease: suspicion, not death."""

    name: str
    revision: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportPut:
    """A member's report was written."""

    name: str
    report: Report
    revision: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TombPut:
    """An incarnation is out."""

    name: str
    tomb: Tomb
    revision: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaderPut:
    """Somebody leads; the revision is the fencing token."""

    claim: Claim
    revision: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaderGone:
    """Nobody leads."""

    revision: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationPut:
    """A generation was sealed."""

    generation: Generation
    revision: int


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
class Listed:
    """Everything under the run id, read at one revision: at the start, or after a gap in the watch."""

    items: tuple[MemberPut | ReportPut | TombPut | LeaderPut | GenerationPut | ProposalPut | EndPut, ...]
    revision: int
    gap: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdLost:
    """No endpoint answers, and none has since this monotonic time."""

    since: float


@dataclass(frozen=True, slots=True)
class EtcdBack:
    """etcd answers again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRefused:
    """The peer's host refuses the heartbeat connection: its keeper is dead."""

    name: str
    incarnation: str
    evidence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerHeard:
    """The heartbeat connection to the peer is alive, or (`alive=False`) silent."""

    name: str
    incarnation: str
    alive: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """All own trainers of this generation are built and wait."""

    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """All own trainers left after `step`, and their last snapshot is safe."""

    key: str
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """`main` returned on all own slots."""

    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Faulted:
    """An own trainer died (`error=False`) or the user's code raised (`error=True`)."""

    key: str
    detail: str
    error: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Interrupted:
    """An own trainer lost a peer and stopped; somebody else knows why."""

    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """A step was committed. `etcd_away`: in its vote every member had lost etcd."""

    step: int
    etcd_away: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """All own slots wrote their tiles of this step to the store."""

    saved: SavedStep


@dataclass(frozen=True, slots=True)
class LeaveAsked:
    """This node shall leave the job (SIGTERM to its keepers)."""


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
    MemberPut
    | MemberGone
    | ReportPut
    | TombPut
    | LeaderPut
    | LeaderGone
    | GenerationPut
    | ProposalPut
    | ProposalGone
    | EndPut
    | Listed
    | EtcdLost
    | EtcdBack
    | PeerRefused
    | PeerHeard
    | Prepared
    | Left
    | Finished
    | Faulted
    | Interrupted
    | Progress
    | Saved
    | LeaveAsked
    | Broken
    | Tick
    | WriteDone
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PutMember:
    """Register under the own lease (again, if it was lost)."""

    record: MemberRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class PutReport:
    """Write the own report."""

    report: Report


@dataclass(frozen=True, slots=True, kw_only=True)
class Bury:
    """Delete the keys of this incarnation and put up its tomb. Fenced by the incarnation."""

    name: str
    tomb: Tomb


@dataclass(frozen=True, slots=True, kw_only=True)
class Campaign:
    """Take the lead if the leader key still has this mod revision (0: does not exist). Fenced."""

    expected: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Seal:
    """Write the generation record, fenced on the leader's token and the record's revision."""

    generation: Generation
    token: int
    previous: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Propose:
    """Write the proposal, fenced like a seal."""

    proposal: Proposal
    token: int
    previous: int


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
class Watch:
    """Hold heartbeat connections to these (name, incarnation, address, port) and to nobody else."""

    peers: tuple[tuple[str, str, str, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepare:
    """Fork trainers for this generation and let them build everything."""

    generation: Generation


@dataclass(frozen=True, slots=True, kw_only=True)
class Go:
    """The generation is sealed: its prepared trainers restore and train."""

    generation: Generation
    members: tuple[MemberRecord, ...] = field(default=())


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
class Exit:
    """Leave the job for good. `failed` with the reason; `refused`: it was the job that said no."""

    failed: bool
    detail: str = ""


Write = PutMember | PutReport | Bury | Campaign | Seal | Propose | Withdraw | PutEnd
Local = Watch | Prepare | Go | AskLeave | Stop | Fence | Commit | Exit
Action = Write | Local
FENCED = (Campaign, Seal, Propose, Withdraw, PutEnd)

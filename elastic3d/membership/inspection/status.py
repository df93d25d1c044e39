"""How a job stands, for people and programs: one frozen value. `derivation` makes it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from elastic3d.coverage import AuditCoverage
from elastic3d.membership.records import Pulse, SlowFigures
from elastic3d.shortfall import MemoryBound
from elastic3d.values import Cause, DeviceFacts, Layout


class JobState(StrEnum):
    """What the job is doing.

    forming: no generation was ever sealed. training: a sealed generation whose nodes are all there. re-forming: one of
    them is out, or all were asked to leave, and the next generation is not sealed yet. waiting: too few nodes are
    there. ended, failed: it is over.
    """

    FORMING = "forming"
    TRAINING = "training"
    REFORMING = "re-forming"
    WAITING = "waiting"
    ENDED = "ended"
    FAILED = "failed"


class NodeState(StrEnum):
    """What a node is doing.

    silent: neighbours do not hear it. apart: it and an active node cannot connect to each other, and it stands aside
    until they can. doubted: it was asked through etcd whether it lives. lost lease: its keys are gone, and nobody has
    declared it out. out: declared so, while the sealed generation still names it. gone: not there any more, after the
    job's end.
    """

    ACTIVE = "active"
    FINISHED = "finished"
    SPARE = "spare"
    JOINING = "joining"
    PREPARING = "preparing"
    PREPARED = "prepared"
    DRAINING = "draining"
    QUARANTINED = "quarantined"
    APART = "apart"
    SILENT = "silent"
    DOUBTED = "doubted"
    LOST_LEASE = "lost lease"
    OUT = "out"
    GONE = "gone"
    REFUSED = "refused"
    UNREADABLE = "unreadable"


class NodeRole(StrEnum):
    """What the sealed generation says of a node."""

    ACTIVE = "active"
    SPARE = "spare"
    NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStatus:
    """One node."""

    name: str
    """Its name."""
    incarnation: str = ""
    """Which process of that name; "" for a machine that is only kept out."""
    machine: str
    """What `quarantine` and `release` go by."""
    state: NodeState
    """What it is doing."""
    role: NodeRole = NodeRole.NONE
    """What the sealed generation says of it."""
    leads: bool = False
    """Whether it leads the membership."""
    detail: str = ""
    """Why it is in this state, for people."""
    seconds_left: float | None = None
    """Until a drain's deadline or a quarantine's end, None where there is none."""
    first_rank: int | None = None
    """Global rank of its first slot, None unless active."""
    slots: int = 0
    """How many trainers it can run."""
    address: str = ""
    """Where the others reach it."""
    labels: dict[str, str]
    """Where it stands, by level."""
    device: DeviceFacts | None = None
    """What its trainers compute on, None where it did not say."""
    health: tuple[str, ...] = ()
    """What is wrong, () for nothing."""
    pulse: Pulse | None = None
    """Its own newest figures, None where it reported none."""
    clean: int = -1
    """The newest step that audits vouch for in which this node took part, -1 for none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationStatus:
    """A generation, or one that is being prepared."""

    number: int
    """Grows with each that is sealed."""
    attempt: int
    """Tells proposals of one number apart."""
    cause: Cause
    """Why it was formed."""
    detail: str
    """Why exactly, for people."""
    layout: Layout | None
    """Of its mesh, None in mode restart."""
    world: int
    """How many ranks."""
    nodes: tuple[str, ...]
    """Names of the active nodes, in rank order."""
    spares: tuple[str, ...]
    """Names of those that wait."""
    mesh: tuple[tuple[str, ...], ...] = ()
    """By pipeline stage and replica, the node that stands there; () without a layout."""
    memory: MemoryBound | None = None
    """What its ranks may need, and compute again for it, since memory ran out; None where it never did."""
    age: float | None = None
    """Seconds since it was sealed, by the leader's wall clock; None where that is not known."""
    switching: bool = False
    """The running trainers were asked to leave for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateAge:
    """The newest state that is held. It is from `age` to `age` + `within` seconds old."""

    step: int
    """Its step."""
    age: float
    """Seconds, at least."""
    within: float
    """Seconds by which it may be older: the age was reported that long ago, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SuspectRank:
    """A rank that makes no progress and may be what all others wait for."""

    node: str
    """Name of its node."""
    rank: int
    """Its number in the sealed generation."""
    step: int
    """The newest step that it made, -1 for none."""
    phase: str
    """What it was at."""
    state: str
    """How its processes are."""
    seconds: float
    """How long it had made no progress when its node reported that."""
    detail: str
    """Where it is, and what is odd about it, for people; "" where that is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictStatus:
    """What the leader found out when nothing moved."""

    number: int
    """Of the generation that it is about."""
    fault: str
    """The kind of fault."""
    nodes: tuple[str, ...]
    """Names of the nodes at fault, () where none can be singled out."""
    ranks: tuple[int, ...]
    """Their ranks that are."""
    step: int
    """The newest step at that time, -1 for none."""
    detail: str
    """What was found, for people."""
    acted: bool
    """Whether that generation was ended for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthStatus:
    """How ranks that stand still or compute wrongly are found in this job, and what is not."""

    idle: float
    """Seconds for which a rank may be silent that neither computes nor reads, once it has made two steps, and longer
    where its own steps had longer gaps; 0: nobody looks."""
    busy: float
    """The same for a rank that computes or reads."""
    acts: bool
    """Whether anything follows from what is found, or it is only reported."""
    audit: float
    """Share of the computing that audits may take, 0 for none."""
    coverage: AuditCoverage | None
    """What audits see in this generation, None where none are asked for, and before it trains."""
    clean: int
    """The newest step that audits vouch for on all active nodes, -1 for none."""
    slow_from: float
    """How many times as long as elsewhere the same work takes on a node that counts as slow; 0: nobody measures it."""
    slow: tuple[SlowFigures, ...]
    """Nodes that are slow."""
    left_out: int
    """Micro-batches that the run has left out so far."""
    skipped: int
    """Its updates that were skipped, since they were not finite."""
    spike: int
    """The newest step in which its loss had jumped up, -1 for none."""
    uncovered: tuple[str, ...]
    """What nobody looks for, in plain words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GoodputStatus:
    """Where the time of the nodes went, as the leader accounts for it while the job runs.

    Exact sums of what it knows; `elastic3d goodput` knows more, from the event files of all nodes.
    """

    share: float
    """Of the time that nodes were held, what went to steps that count; 0 before any was."""
    held: float
    """Node-seconds that nodes were held."""
    steps: int
    """Steps that count."""
    by_category: dict[str, float]
    """Node-seconds by what they went to, in the order of the categories; 0 where there are none."""
    by_cause: dict[str, dict[str, float]]
    """Of these, what generations cost, by why they were formed."""
    since: float
    """When the account was begun, in seconds since the epoch, by the clock of who led then."""
    age: float
    """Seconds since it was written, by the leader's wall clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """How a job stands; with a `schema`, what `elastic3d status --json` prints."""

    run_id: str
    """torchrun's `--rdzv-id`."""
    revision: int
    """Of etcd, at which all of this held."""
    state: JobState
    """What the job is doing."""
    detail: str
    """Why, for people."""
    leader: str
    """Name of the node that leads, "" for none."""
    generation: GenerationStatus | None
    """The sealed one, None before the first."""
    preparing: GenerationStatus | None
    """The one that is being prepared, None where none is."""
    nodes: tuple[NodeStatus, ...]
    """All nodes that are known, active ones first, in rank order."""
    step: int
    """The newest step, -1 where none was reported."""
    until: int
    """The step up to which the script trains, 0 if it did not say."""
    step_seconds: float
    """How long a step takes, 0 where that was not reported."""
    loss: float | None
    """That of the newest step, None where it was not reported or is not finite."""
    snapshot: StateAge | None
    """The newest one in memory that all hold twice."""
    snapshot_every: int
    """Steps from one to the next, 0 where there are none or that was not reported."""
    checkpoint: StateAge | None
    """The newest one committed."""
    verified: StateAge | None
    """The newest one that was read back."""
    vetted: StateAge | None
    """The newest one of whose making every node was audited; its age is since that was found out."""
    unvetted: str
    """Why there is none, "" where there is or where that is not known."""
    suspects: tuple[SuspectRank, ...]
    """Ranks that may be what all others wait for."""
    verdict: VerdictStatus | None
    """The newest of this job, None where nothing was ever found."""
    health: HealthStatus | None
    """How its ranks are watched, None where that was not reported."""
    goodput: GoodputStatus | None
    """Where the time of its nodes went, None before anybody has accounted for it."""
    injectable: tuple[str, ...]
    """Names of the nodes that allow faults to be injected, in order; () for none."""
    minimum: int
    """Fewest active nodes; 0: not known."""
    maximum: int
    """Most active nodes; 0: not known."""
    problems: tuple[str, ...]
    """Keys that cannot be read, and why."""

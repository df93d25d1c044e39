"""The seam between a `Run` and the process that hosts it.

A trainer's `Run` knows nothing of keepers, sockets or shared memory: its only access to the world outside its process
group is a `Port`. In a trainer the port talks to the node's keeper; in a script started by hand it is a
`StandalonePort` of `training.standalone`. Values that cross are frozen. A method that returns `NoReturn` ends the
trainer's process, or raises if the host is the user's own script.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from checkpointing.format.grid import TILE_BYTES
from elastic3d.coverage import AuditCoverage
from elastic3d.devices import ComputeDevice, Stopwatch
from elastic3d.distrust import Distrust
from elastic3d.rollback import Rollback
from elastic3d.trust.credentials import Credentials
from elastic3d.values import Layout, ModelProfile, ProvenChain, StoreAt

if TYPE_CHECKING:
    import torch

    from checkpointing.format.tiles import Box, TensorSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """The assignment of one trainer: its rank in one attempt at one generation, and where that generation meets.

    measuring: build the model on meta, report its profile at `restore`, train nothing.
    layout: None while measuring. interface: network interface for gloo, "" to leave the choice to gloo.
    store_host, store_port, store_prefix: the TCPStore in which this generation's process groups meet, and their part of
    it. store: where checkpoints are, None for nowhere. threads: CPU threads for tensor operations.
    snapshot_every, checkpoint_every: in steps, 0 for never; snapshots also None, for as often as their cost allows.
    checkpoint_seconds: least time between the beginnings of
    two checkpoints, 0.0 if steps decide. seed_digest: the profile digest from which the leader planned, "" if nobody
    has planned. places: for a measuring trainer, how many device places of its node to check before it ends, 0 for
    none. restore: the checkpoint to go on from if nothing is in memory. fresh: beginning at step 0 is intended even if
    steps were made before. tile_bytes: largest size of a tile of its snapshots. credentials: for the tile servers of
    the run; None while measuring. device: the kind of device it computes on; its slot says which one. device_free:
    bytes of the device's memory that are free while no trainer holds any, 0 if that was not measured. expects_state:
    there is most likely a state to go on from, so that initial weights would be made in vain; correct either way.
    audit: the share of computing that audits may take, 0.0 for none. at_rest: the share of the time that looking at
    state at rest may take, 0.0 for neither that nor the other checks of `training.checking`. audit_acts: a rank that is
    found to be wrong ends the generation; else it is only reported. numerics, spike: what follows when a step is not
    finite, or its loss jumps up, of `health.numerics`. rollback_steps: how many steps it may go back for that.
    newcomer: the node was not in the generation before, or has never agreed with others in an audit or an exam.
    accident: seconds since an audit last found that this rank's device erred once, in a generation before; None if none
    did.
    nodes: names of the nodes of the generation; none while measuring, and outside a job.
    proven: what a measuring trainer of this node has proven of the model, so that it need not be proven again.
    recompute: what blocks compute again at least, of `shortfall.RECOMPUTED`, whatever the script asks for.
    recorded: the descriptors of its progress record come with it. sheets: its steps are measured, with those of all
    other ranks. standby: while it trains, its slot keeps a standby on a device of which one trainer holds the memory.
    sockets: the folder that its multiprocessing uses, "" for one of its own.
    """

    run_id: str
    generation: int
    attempt: int
    measuring: bool
    rank: int
    world: int
    node: str
    slot: int
    layout: Layout | None
    store_host: str
    store_port: int
    store_prefix: str
    interface: str
    store: StoreAt | None
    threads: int
    snapshot_every: int | None
    checkpoint_every: int
    seed_digest: str = ""
    places: int = 0
    checkpoint_seconds: float = 0.0
    restore: str = "latest"
    fresh: bool = False
    tile_bytes: int = TILE_BYTES
    credentials: Credentials | None = None
    device: str = "cpu"
    device_free: int = 0
    expects_state: bool = False
    audit: float = 0.0
    at_rest: float = 0.0
    audit_acts: bool = True
    numerics: str = "off"
    spike: str = "off"
    rollback_steps: int = 0
    newcomer: bool = False
    accident: float | None = None
    nodes: tuple[str, ...] = ()
    proven: ProvenChain | None = None
    recompute: str = "none"
    recorded: bool = False
    sheets: bool = False
    standby: bool = False
    sockets: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NearMemory:
    """Memory of the trainer's own node that holds snapshots.

    server: "host:port" of the tile server that offers them to all. lender: abstract name of the Unix socket where
    processes of this node get the memory itself.
    """

    server: str
    lender: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Go:
    """Permission to start: the "host:port" of every keeper's tile server, of active nodes and spares.

    near: those of them on the trainer's own node. newest: the newest step this slot has heard of from its trainers of
    any generation, -1 for none. reached: a step that was safe in memory, as the sealed record says, 0 for none.
    failed_after: the step after which the user's code raised, if that is why this generation was formed; -1 if it was
    formed for another reason, or if that step was made before the generation that failed, so that nothing would be
    skipped. failure: what it raised. distrusted: rules for states that it must not go on from. rollbacks: what is left
    out since the loss jumped up, of which older states do not know.
    """

    servers: tuple[str, ...]
    near: tuple[NearMemory, ...] = ()
    newest: int = -1
    reached: int = 0
    failed_after: int = -1
    failure: str = ""
    distrusted: tuple[Distrust, ...] = ()
    rollbacks: tuple[Rollback, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Flags:
    """What this rank's host contributes to the next step vote.

    ready: it is done with the last checkpoint, and could take another.
    """

    leave: bool
    etcd_away: bool
    ready: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One step, the same on every rank except for `seconds`.

    step: the number of optimizer updates made, this one included. gradient_norm: before clipping, None if no clip was
    asked for. safe_step: the newest step that every rank holds at home and at its buddy, -1 for none.
    samples: positions of the run that this step consumed, half-open. sample_sum: keyed sum of the consumed sample ids.
    until: the step up to which the script trains, 0 if it did not say. snapshot_every: the steps from one snapshot to
    the next from now on, 0 for none. snapshot_rank: the rank that needs the most, -1 if that does not matter.
    processor: seconds of processor time that the trainer has used for it, in all its threads. excluded: those of its
    positions that were left out. why_excluded: in words, "" if that was known before. usual: the median of the losses
    before it, if it shows that they have jumped up, else None; why_kept: why nothing is done about that, though the run
    asks for it. left_out: micro-batches of the run so far that are no part of it. skipped: its updates that were
    skipped since they were not finite. spike: the newest step in which the loss had jumped up, -1 for none.
    sheets: the rows of some ranks' steps (`health.sheet`); only on the first slot of a node, where steps are measured.
    clean: the newest step that audits vouch for, -1 where nothing is audited. data, copy: of `seconds`, those in which
    this rank waited for its data loader, and for the copy of a snapshot. read: bytes from object storage that its
    samples were made of. tokens: of the samples that were not left out,
    0 where the data set does not say how many its samples have. logged: what scripts logged of it, by name; only on the
    first slot of a node. stopped: why the script ended the run after it, "" where it did not. resized: why the next
    step has another global batch, "" where it has not. noise_scale: of the gradient, in samples; None where it is not
    measured, or lost.
    """

    generation: int
    step: int
    loss: float
    gradient_norm: float | None
    seconds: float
    safe_step: int
    etcd_away_everywhere: bool
    samples: tuple[int, int]
    sample_sum: int
    until: int = 0
    snapshot_every: int = 1
    snapshot_rank: int = -1
    processor: float = 0.0
    excluded: tuple[tuple[int, int], ...] = ()
    why_excluded: str = ""
    usual: float | None = None
    why_kept: str = ""
    left_out: int = 0
    skipped: int = 0
    spike: int = -1
    sheets: tuple[tuple[float, ...], ...] = ()
    clean: int = -1
    data: float = 0.0
    read: int = 0
    copy: float = 0.0
    tokens: int = 0
    logged: dict[str, float] = field(default_factory=dict)
    stopped: str = ""
    resized: str = ""
    noise_scale: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of a trainer's beginning. seconds: how long it took. processor: seconds of processor time it used."""

    name: str
    seconds: float
    processor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StateRestored:
    """A trainer has its state. source: "none", "memory" or "store"; step, generation: which state it is.

    detail: what a person should know about it. damaged: checkpoints that were passed over. parts: where the time since
    the trainer's beginning went, in order. audits: what is audited from now on, None where nobody asked for audits.
    loss: of the last step that led to the state, in hexadecimal, "" where the state has none.
    """

    source: str
    step: int
    generation: int
    detail: str = ""
    damaged: tuple[str, ...] = ()
    parts: tuple[Part, ...] = ()
    audits: AuditCoverage | None = None
    loss: str = ""


class Audited(StrEnum):
    """What audits have to say."""

    OFF = "off"  # this generation is not audited
    FAILED = "failed"  # two ranks differed, and this is what a hearing found
    REDONE = "redone"  # the step's passes are made again
    INCONCLUSIVE = "inconclusive"  # nobody could be convicted, and training goes on
    LYING = "lying"  # a rank computes wrongly: no update is made
    ALTERED = "altered"  # bits of a rank's state changed though nobody wrote to them
    SPLIT = "split"  # ranks left a vote with different outcomes
    MISCALCULATED = "miscalculated"  # a piece of an update that was computed again came to other bits
    UNCHECKED = "unchecked"  # something that is not checked in this generation
    EXAMINED = "examined"  # the newcomers of this generation computed what all others did
    UNEXAMINED = "unexamined"  # this generation's newcomers could not be examined
    SPIKED = "spiked"  # the loss jumped up, and the run goes back: no update is made
    PLANNED = "planned"  # what an audit costs became known, and there are more or fewer from here on
    UNFIT = "unfit"  # a rank failed the entrance exam, or was found to compute wrongly in it


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditReport:
    """One thing that audits have to say, the same on every rank.

    step: that would have been made of the audited passes, -1 for none. micro_batch: the first over which ranks
    differed. compared, where: what they differed on, of `hearing.Compared`, and in words. finding: of the hearing.
    ranks, nodes: who computed wrongly. clean: the newest step that audits vouch for: in whose audit all agreed, in this
    generation or an earlier one; -1 where nothing is audited. acted: something is done about it. rollback: what is left
    out for a spike; `clean` is then the newest step whose state the run may go back to. seconds: how long it took to
    find that out, 0.0 where nobody measured it. parts: those in which each rank computed again, by rank. coverage: what
    is audited from here on, None where nothing changes.
    """

    kind: Audited
    detail: str
    step: int = -1
    micro_batch: int = -1
    compared: str = ""
    where: str = ""
    finding: str = ""
    ranks: tuple[int, ...] = ()
    nodes: tuple[str, ...] = ()
    clean: int = -1
    acted: bool = True
    rollback: Rollback | None = None
    seconds: float = 0.0
    parts: tuple[float, ...] = ()
    coverage: AuditCoverage | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalState:
    """One rank's part of the state that a step has left."""

    step: int
    tiles: list[tuple[TensorSpec, Box, torch.Tensor]]
    """Its tensors on their device, each with the part of the whole tensor that it is."""
    facts: dict[str, Any]
    """The state that is no tensor, equal on all ranks."""


class Progress(Protocol):
    """Where a trainer records what it is at, for its keeper to read when nothing moves any more.

    Nothing here blocks, raises, or takes more than some microseconds. Phases and axes are the numbers of
    `elastic3d.health.phases`; operations of an axis are counted from 1 in the order in which they are posted.
    """

    def measure_by(self, stopwatch: Stopwatch | None, failed: Callable[[Exception], None]) -> None:
        """Have steps measured on a device, not by the host; None where the host's clock will do.

        failed: called once if the device's time cannot be had any more, and nothing is measured from then on.
        """
        ...

    def phase(self, phase: int) -> None:
        """Note that another phase begins."""
        ...

    def loading(self) -> None:
        """Note that the data loader is waited for."""
        ...

    def in_script(self, read: int = 0) -> None:
        """Note that the script's own code goes on. read: bytes that the samples which it was given were made of."""
        ...

    def tick(self, *, chunk: int = -1, unit: int = -1) -> None:
        """Note that work goes on. chunk, unit: of the model, where known."""
        ...

    def enter_blocks(self) -> None:
        """Note that a stage's blocks are entered."""
        ...

    def leave_blocks(self, number: int) -> None:
        """Note that so many blocks have been passed since."""
        ...

    def begin_step(self, kind: int) -> None:
        """Note that the passes of a step begin. kind: steps of one kind make the same operations in the same order."""
        ...

    def step(self, step: int) -> None:
        """Note that a step was made, and is the `step`-th of the run."""
        ...

    def enter(self, axis: int, fingerprint: int) -> int:
        """Note that the next operation of an axis is posted and waited for; return its number."""
        ...

    def post(self, axis: int, fingerprint: int) -> int:
        """Note that the next operation of an axis is posted, and not waited for yet; return its number."""
        ...

    def wait(self, axis: int, number: int, fingerprint: int) -> None:
        """Note that an operation posted before is waited for."""
        ...

    def leave(self, axis: int, number: int) -> None:
        """Note that an operation is done, and those of its axis before it. Left out where it failed: that shows."""
        ...

    def spent(self, phase: int) -> float:
        """Return the seconds of the step under way that went to a phase, waits for other ranks left out."""
        ...

    def row(self, work: float) -> tuple[float, ...]:
        """Return the numbers of the last whole eight steps (`health.sheet`), () for none. work: of this rank."""
        ...

    def pause(self, why: str, seconds: float) -> int:
        """Note that nothing may be heard for up to `seconds`, until another phase begins; return the present one."""
        ...


class Unrecorded:
    """A `Progress` that nobody reads."""

    def measure_by(self, stopwatch: Stopwatch | None, failed: Callable[[Exception], None]) -> None:
        """Do nothing."""

    def phase(self, phase: int) -> None:
        """Do nothing."""

    def loading(self) -> None:
        """Do nothing."""

    def in_script(self, read: int = 0) -> None:
        """Do nothing."""

    def tick(self, *, chunk: int = -1, unit: int = -1) -> None:
        """Do nothing."""

    def enter_blocks(self) -> None:
        """Do nothing."""

    def leave_blocks(self, number: int) -> None:
        """Do nothing."""

    def begin_step(self, kind: int) -> None:
        """Do nothing."""

    def step(self, step: int) -> None:
        """Do nothing."""

    def enter(self, axis: int, fingerprint: int) -> int:
        """Return 0."""
        return 0

    def post(self, axis: int, fingerprint: int) -> int:
        """Return 0."""
        return 0

    def wait(self, axis: int, number: int, fingerprint: int) -> None:
        """Do nothing."""

    def leave(self, axis: int, number: int) -> None:
        """Do nothing."""

    def spent(self, phase: int) -> float:
        """Return 0."""
        return 0.0

    def row(self, work: float) -> tuple[float, ...]:
        """Return nothing."""
        return ()

    def pause(self, why: str, seconds: float) -> int:
        """Return 0."""
        return 0


UNRECORDED = Unrecorded()


class Port(Protocol):
    """The host process, as a `Run` sees it. Called only from the trainer's main thread."""

    assignment: Assignment
    device: ComputeDevice
    progress: Progress

    def measured(self, profile: ModelProfile, proven: ProvenChain | None = None) -> NoReturn:
        """Report the profile of a measuring trainer, and what it proved of the model, and end it."""
        ...

    def await_go(self) -> Go:
        """Say "prepared" to the host and block until told to go."""
        ...

    def flags(self) -> Flags:
        """Return this rank's flags for the vote; cheap, never blocks."""
        ...

    def held(self) -> int:
        """Return the newest step held both at home and at the buddy, -1 for none."""
        ...

    def snapshot_needs(self) -> float:
        """Return how many steps apart snapshots should be by what they cost here, 0.0 if that does not matter."""
        ...

    def snapshot(self, state: LocalState, *, checkpoint: bool, wait: bool) -> None:
        """Start copying the state in a thread; with `wait`, return when it is copied.

        Skips the snapshot when no buffer is free, unless `wait`. checkpoint: also make a durable checkpoint of it.
        """
        ...

    def finish_copy(self) -> None:
        """Block until no copy reads the state any more; called before anything changes it."""
        ...

    def copied(self, step: int, key: str, at: int) -> int | None:
        """Return byte `at` of this rank's part of a tensor in the snapshot of `step`, None if that was not taken.

        Between `finish_copy` and the next snapshot.
        """
        ...

    def committed(self, record: StepRecord) -> None:
        """Take note of a step; does not block. `record.safe_step` tells which buffers may be used again."""
        ...

    def audited(self, report: AuditReport) -> None:
        """Report what an audit found."""
        ...

    def convicted(self, report: AuditReport) -> NoReturn:
        """End this trainer before its update: `report` says which rank computes wrongly, this one or another."""
        ...

    def restored(self, state: StateRestored) -> None:
        """Report what state training goes on from."""
        ...

    def leave(self, step: int) -> NoReturn:
        """End this trainer at a step boundary, after a final `snapshot(wait=True)`."""
        ...

    def peer_lost(self, error: BaseException, *, patience: float | None = None) -> NoReturn:
        """End this trainer because a collective failed: another rank is gone, or this one cannot reach it.

        For any thread. patience: seconds that a snapshot which is being copied may take, None for as long as it needs.
        """
        ...

    def done(self, digest: str | None, unsaved: int = -1) -> NoReturn:
        """End this trainer because `main` returned; digest: of the final state, None if it was not asked for.

        unsaved: the step of the last snapshot, which goes to the store before the run is over; -1 if it need not.
        """
        ...

    def failed(self, error: BaseException) -> NoReturn:
        """End this trainer because the user's code raised `error`; the traceback travels to the host."""
        ...

"""The records in etcd under one run id, and their keys.

Two tiers, so that a job of N nodes costs O(N) writes and O(N) deliveries per generation. Everybody watches the board,
which few write; only the leader, and members that must judge it, watch the roster, which everybody writes.

    board/generation      the sealed membership; written only by the leader, fenced
    board/leader          the member that decides; its mod revision is the token that fences every write of a leader
    board/proposal        the membership being prepared beside the running one
    board.whole/generation, board.whole/proposal
                          if the record on the board is large and holds only changes (`changes`): the whole
                          generation, written in the same transaction; read by listings of the board, watched by nobody
    board/end             the job is over: finished or failed
    board/secret          what proves a process to be of the run; not a record (`trust/secret.py`)
    board/tombs/<id>      this incarnation is out: it left, it was found dead, it was refused, another took its name
    board/doubts/<id>     somebody does not hear this incarnation: it shall answer in its report
    board/faults/<id>/<number>  this incarnation shall bring about a fault of its own (`injection`); written by an
                          operator under a lease of its own, and again by the incarnation's keeper as its answer
    roll/members/<id>     a member's node: written once per incarnation, under the member's lease
    roll/reports/<id>     what it sees: its trainers' state, silent neighbours, notices; under the lease
    roll/drains/<name>    this node shall leave; written by an operator
    roll/quarantine/<home>  this machine is kept out; ends with a lease of its own
    roll/flaps/<home>     how often this machine was lost lately; forgotten with a lease of its own
    roll/stalls/<id>      what a node says of its ranks while they stand still (`stalls`); under the member's lease
    pulses/<id>           figures for people, under the member's lease; watched by nobody
    goodput               where the time of the nodes went (`accounting/live_record.py`); written by the leader,
                          fenced, and read by the next one; watched by nobody
    history/<number>.<attempt>  why each generation came to be; written in the transaction that seals it
    verdicts/<number>.<attempt>  what was found about this generation; if it had to end, written in the transaction that
                          seals the next one
    refused/<name>        a node that failed its own admission, and why; under a lease of its own

<id> is `Node.id`: name@incarnation. Each incarnation has its own keys, so that nothing need be compared to bury it.
Values are JSON objects with a schema version; a reader refuses a newer version and ignores fields it does not know.
"""

from __future__ import annotations

import json
import typing
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeVar

from elastic3d import etcd_keys as keys
from elastic3d.coverage import AuditCoverage
from elastic3d.errors import ConfigurationError
from elastic3d.membership import changes, encoding
from elastic3d.membership.slowness import SpeedReport
from elastic3d.rollback import Rollback
from elastic3d.shortfall import Shortfall
from elastic3d.values import Cause, DeviceFacts, Generation, ModelProfile, Node, from_json, to_json

SCHEMA = 9
"""Schema 1 had no changes: every generation and proposal was written whole. Up to 2 reports had other names. In 4 a
generation may have come to be because ranks stood still. In 5 it may say from which states nobody goes on, in 6 for
which slow machines it was formed, in 7 what is left out since its loss jumped up, in 8 what its ranks may need
since memory ran out. In 9 it says which convictions it knows of, and reports may tell of several."""

_RENAMED = {"fault": "failed", "interrupted": "peer_lost"}
"""Fields of reports by the names that schema 2 has for them."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberRecord:
    """A node that wants to take part. `floor` is the newest generation number its store has seen.

    minimum, maximum: how many nodes its policy wants, 0 if not given; for people only. encrypted: whether it
    encrypts connections between nodes, and expects it. device: what its trainers compute on, None in mode restart.
    chaos: whether its keeper carries out orders of faults (`injection`).
    """

    node: Node
    profile: ModelProfile | None = None
    floor: int = 0
    minimum: int = 0
    maximum: int = 0
    encrypted: bool = False
    device: DeviceFacts | None = None
    chaos: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedStep:
    """A step's tiles, made in one attempt at a generation of `world` ranks, as far as one node wrote them."""

    step: int
    made_in: int
    attempt: int
    world: int


SIGNAL = "signal"
"""The kind of a notice that a signal gave: SIGTERM or SIGINT."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """This node has to leave. seconds: how long it had when the notice was heard, None if nobody said.

    kind: the source: aws, gcp, azure, signal. The time runs from when a reader first sees it: no clocks are compared.
    at: the node's wall clock then, for people only; 0.0 if not given.
    """

    kind: str
    seconds: float | None = None
    detail: str = ""
    at: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasonToGoBack:
    """Why a member's trainers ended so that the run goes back: a device was convicted, or the loss jumped up.

    key: of their generation. clean: the newest step whose state the run may go on from, -1 if it may from any.
    accused: machines of the nodes whose devices were convicted by the word of ranks on others, by id: its own, or that
    of another node, to which it is a witness. rollback: what is left out because the loss jumped up. detail: in words.
    """

    key: str
    clean: int = -1
    accused: dict[str, str] = field(default_factory=dict)
    rollback: Rollback | None = None
    detail: str = ""

    @property
    def number(self) -> int:
        """The number of the generation in which it was."""
        return int(self.key.partition(".")[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a member says about itself. Each of the key fields names a generation's `key`, "" for none.

    prepared: its trainers are built and wait. left: its trainers left at the boundary after `step`. finished: `main`
    returned on all its slots. failed: a trainer failed, and not by an error of the script. error: the script raised.
    goes_back: in which generations its trainers ended so that the run goes back, and why, as far as no record has it.
    final: trying again cannot mend that error. out_of_memory: that error was that memory ran out; short: what was
    missing, None where nobody knows. peer_lost: a trainer lost a peer and stopped, which is no failure of its own.
    detail: what failed, raised or was lost, in words. silent: ids of the neighbours on the ring it does not hear.
    unreachable: ids of nodes it could not connect to while its trainers stood still (`machine/reach.py`). answered:
    the newest doubt about itself that it has seen. notice: why this node has to leave soon. saved: the newest step
    whose tiles all its slots wrote to the store. step, safe: the newest step committed, and the newest one that all
    ranks hold at home and at their buddies; 0 for none. unread: the revision of the generation's record, if this
    member cannot read it and knows no generation. speeds: which nodes of its generation are slow, from the node of
    rank 0.
    """

    incarnation: str
    prepared: str = ""
    left: str = ""
    finished: str = ""
    failed: str = ""
    error: str = ""
    peer_lost: str = ""
    detail: str = ""
    final: bool = False
    out_of_memory: bool = False
    short: Shortfall | None = None
    goes_back: tuple[ReasonToGoBack, ...] = ()
    step: int = 0
    silent: tuple[str, ...] = ()
    unreachable: tuple[str, ...] = ()
    answered: str = ""
    notice: Notice | None = None
    saved: SavedStep | None = None
    safe: int = 0
    unread: str = ""
    speeds: SpeedReport | None = None


class Out(StrEnum):
    """Why an incarnation is out."""

    LEFT = "left"
    DEAD = "dead"
    REFUSED = "refused"
    REPLACED = "replaced"
    FAILED = "failed"  # its code raised where no other node's did


@dataclass(frozen=True, slots=True, kw_only=True)
class Tomb:
    """This incarnation of the node is out for good; `detail` is the evidence, `by` who wrote it."""

    incarnation: str
    how: Out
    detail: str = ""
    by: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Doubt:
    """`by`, an id, does not hear this incarnation. `mark` is new for each doubt; the accused answers with it."""

    mark: str
    by: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain:
    """The node shall leave within `seconds` of when the leader sees this; `incarnation` "": any under that name.

    at: the writer's wall clock, for people only; 0.0 if not given.
    """

    seconds: float
    reason: str = ""
    by: str = ""
    incarnation: str = ""
    at: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Quarantine:
    """The machine is kept out for `seconds` after this was written; the key's lease ends it."""

    seconds: float
    reason: str = ""
    by: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flap:
    """How many incarnations of the machine were lost lately, and how often its ranks held all others up (`stuck`).

    id: of the last of these.
    """

    id: str
    count: int
    stuck: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationHistory:
    """A generation as people remember it. at: the leader's wall clock, for people only."""

    number: int
    attempt: int
    cause: Cause
    detail: str
    leader: str
    active: int
    spares: int
    joined: tuple[str, ...]
    left: tuple[str, ...]
    layout: str
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowFigures:
    """A node that slows the others down."""

    node: str
    """Its name."""
    rho: float
    """How many times as long its work takes as that of the others; of data and host, how many times as long a step."""
    kind: str
    """What is slow: compute, data or host."""
    since: int
    """The step from which on."""
    cost: float
    """Seconds of a step that it costs."""
    detail: str
    """In words."""
    ranks: tuple[int, ...] = ()
    """Those of its ranks that show it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthFigures:
    """How a node finds ranks that stand still, are slow or compute wrongly, for people.

    idle, busy: seconds for which a rank may be silent that neither computes nor reads, and one that does. acts: whether
    anything follows from what is found. audit: share of the computing that audits may take, 0.0 for none. coverage:
    what they see in the generation that trains, None where none does. clean: the newest step that they vouch for, -1
    where nothing is audited. at_rest: share of the time for looking at state at rest, 0.0 where neither that nor votes
    and updates are checked. slow_from: from which factor on a node is slow, 0.0 where nobody measures; slow: the slow
    nodes, as far as this one has seen enough steps. left_out: micro-batches that the run has left out so far; skipped:
    its updates that were skipped, since they were not finite; spike: the newest step in which its loss had jumped up,
    -1 for none. unchecked: which checks are not made in this generation though the run asks for them, and why.
    """

    idle: float
    busy: float
    acts: bool = True
    audit: float = 0.0
    coverage: AuditCoverage | None = None
    clean: int = -1
    at_rest: float = 0.0
    slow_from: float = 0.0
    slow: tuple[SlowFigures, ...] = ()
    left_out: int = 0
    skipped: int = 0
    spike: int = -1
    unchecked: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulse:
    """A member's figures for people, written every `every` seconds. Ages are in seconds when written; -1 for never.

    state: active, spare, quarantined, draining, joining. step_seconds: the newest step's duration. loss: that
    step's, None where it is not known or not finite, and from members that do not write it. snapshot_every: steps
    from one snapshot to the next, 0 for none. unvetted: why no checkpoint is vetted, "" where one is or where that
    is not known. watch: how ranks are watched, None where nobody does. until: the step up to which the script trains, 0
    if it did not say. busy: the share of the newest steps in which the node's first rank computed, -1.0 where nobody
    measured it. memory: bytes that its keepers and trainers have in the host's memory, 0 if that is not known.
    """

    state: str
    generation: int
    every: float
    step: int = -1
    step_seconds: float = 0.0
    loss: float | None = None
    snapshot_step: int = -1
    snapshot_age: float = -1.0
    snapshot_every: int = 0
    checkpoint_step: int = -1
    checkpoint_age: float = -1.0
    verified_step: int = -1
    verified_age: float = -1.0
    vetted_step: int = -1
    vetted_age: float = -1.0
    unvetted: str = ""
    health: str = "ok"
    detail: str = ""
    watch: HealthFigures | None = None
    until: int = 0
    busy: float = -1.0
    memory: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """The member that leads."""

    name: str
    incarnation: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A generation being prepared. `switch`: all are prepared, the running trainers shall leave."""

    generation: Generation
    switch: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """The job is over.

    stopped: every node was told to leave before all steps were made, so that whoever starts nodes may start it again.
    """

    failed: bool
    stopped: bool = False
    detail: str = ""


END_LASTS = 120.0
"""Seconds. A node that starts gives up on an etcd that is away well before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LastEnd:
    """The newest end of a job under its id, under a lease of `END_LASTS` seconds, which says how long ago it was.

    term: of etcd's leader when that lease was about to be granted. A new leader begins all leases anew.
    """

    end: End
    term: int


class NewerSchema(ConfigurationError):
    """A newer elastic3d wrote this record: nobody may guess its meaning, let alone overwrite it."""


class BaseUnknown(ConfigurationError):
    """This record holds changes against a generation that its reader does not know: list the board."""


def encode(record: Any) -> bytes:
    """Return the JSON bytes of a record, with its schema version. Generations have their own form (`encoding`)."""
    if isinstance(record, Generation):
        return encoding.pack(encoding.write_generation(record), SCHEMA)
    if isinstance(record, Proposal):
        return _pack_proposal(record, encoding.write_generation(record.generation))
    return json.dumps({"schema": SCHEMA, **to_json(record)}, separators=(",", ":")).encode()


def encode_change(record: Generation | Proposal, base: Generation) -> bytes:
    """Return the same for a generation, or a proposed one, as its changes against `base`."""
    if isinstance(record, Proposal):
        return _pack_proposal(record, changes.write_change(base, record.generation))
    return encoding.pack(changes.write_change(base, record), SCHEMA)


def decode(kind: type[T], value: bytes, key: str, *, base: Generation | None = None, whole: bytes | None = None) -> T:
    """Return the record that was encoded; ConfigurationError for garbage, NewerSchema, naming the key.

    base: the generation against which a change is read; BaseUnknown if that is not the writer's. whole: read this value
    of the key of the whole generation instead, b"" for none.
    """
    try:
        data = json.loads(value)
        schema = data.pop("schema")
        if not isinstance(schema, int):
            raise TypeError(f"its schema is {schema!r}")
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise ConfigurationError(
            f"etcd key {key} holds no elastic3d record ({error}); another program writes under this prefix: "
            "choose another --rdzv-id or prefix"
        ) from error
    if schema > SCHEMA:
        raise NewerSchema(f"etcd key {key} has schema {schema}, this elastic3d reads up to {SCHEMA}: upgrade this node")

    def formed(data: Any) -> Generation:
        if not changes.is_change(data):
            return encoding.read_generation(data)
        if whole is not None:
            return _whole(data, whole, key)
        return _changed(data, base, key)

    try:
        if kind is Generation:
            return typing.cast(T, formed(encoding.unpack(data)))
        if kind is Proposal:
            data = encoding.unpack(data)
            switch = data.get("switch", False)
            if not isinstance(switch, bool):
                raise ValueError(f"expected bool, got {switch!r}")
            return typing.cast(T, Proposal(generation=formed(data.get("generation")), switch=switch))
        if kind is Report and schema < 3:
            data = {_RENAMED.get(name, name): value for name, value in data.items()}
        if kind is Report and schema < 9:
            data = _of_one_generation(data)
        return from_json(kind, data)
    except BaseUnknown:
        raise
    except (ValueError, TypeError) as error:
        raise ConfigurationError(f"etcd key {key} does not fit {kind.__name__}: {error}") from error


def _of_one_generation(data: dict[str, Any]) -> dict[str, Any]:
    """Return a report in which it stood beside the other fields why the run goes back, as it is written now."""
    said = {name: data[name] for name in ("clean", "accused", "rollback", "detail") if name in data}
    key = data.get("goes_back")
    return {**data, "goes_back": [{"key": key, **said}] if key else []}


def _pack_proposal(proposal: Proposal, formed: dict[str, Any]) -> bytes:
    return encoding.pack({"generation": formed, "switch": proposal.switch}, SCHEMA)


def _changed(data: dict[str, Any], base: Generation | None, key: str) -> Generation:
    unknown = f"etcd key {key} holds changes against a generation that this reader does not know"
    if base is None:
        raise BaseUnknown(f"{unknown}: it has to read {keys.whole(key)}")
    try:
        return changes.apply_change(base, data)
    except (ValueError, TypeError) as error:
        raise BaseUnknown(f"{unknown} ({error}): it has to read {keys.whole(key)}") from error


def _whole(data: dict[str, Any], whole: bytes, key: str) -> Generation:
    try:
        formed = decode(Generation, whole, keys.whole(key))
    except BaseUnknown as error:
        raise ValueError(f"{keys.whole(key)} holds no whole generation either") from error
    if changes.digest_of(formed) != data["digest"]:
        raise ValueError(f"{keys.whole(key)} does not hold the generation that the changes lead to")
    return formed

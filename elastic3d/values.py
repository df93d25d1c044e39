"""The values that cross every boundary of elastic3d: frozen, and readable as JSON.

`to_json` and `from_json` turn any of them into plain JSON data and back. Unknown fields are ignored on reading, so
that a newer writer can talk to an older reader of the same schema version.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeVar

from elastic3d.distrust import Distrust
from elastic3d.errors import LayoutError
from elastic3d.owners import Owners
from elastic3d.pace import Pace
from elastic3d.rollback import Rollback
from elastic3d.shortfall import MemoryBound

T = TypeVar("T")


class Schedule(StrEnum):
    """The order in which a pipeline's stages run their micro-batches; names as in torch.distributed.pipelining."""

    GPIPE = "gpipe"
    ONE_F_ONE_B = "1f1b"
    INTERLEAVED = "interleaved"
    ZERO_BUBBLE = "zero-bubble"
    ZBV = "zbv"
    DUALPIPE_V = "dualpipev"

    @property
    def splits_backward(self) -> bool:
        """Whether gradients of inputs and of weights are computed separately, which ZeRO-3 cannot follow."""
        return self in (Schedule.ZERO_BUBBLE, Schedule.ZBV, Schedule.DUALPIPE_V)

    @property
    def folds(self) -> bool:
        """Whether rank r has stages r and 2 pp - 1 - r, so that the first rank has the last stage too."""
        return self in (Schedule.ZBV, Schedule.DUALPIPE_V)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Sizes of the mesh axes and what runs on them. In a request, the planner chooses whatever is 0, None or empty."""

    pp: int = 0
    """Pipeline ranks."""
    dp: int = 0
    """Data-parallel ranks."""
    tp: int = 1
    """Tensor-parallel ranks."""
    cp: int = 1
    """Context-parallel ranks, which share the chunks of a sequence."""
    zero: int = 3
    """ZeRO stage, 1 to 3."""
    replicas: int = 1
    """Groups of dp / replicas ranks each hold one copy of the sharded state (HSDP); 1 shards over all of dp."""
    schedule: Schedule | None = None
    """Schedule of the pipeline, None if pp is 1."""
    virtual: int = 1
    """Stages on each rank; 1 except for the schedules that have more."""
    cuts: tuple[int, ...] = ()
    """Number of the first block of each stage but the first, in order of stages; () for runs of equal length."""
    shares: tuple[int, ...] = ()
    """How many of every sum(shares) micro-batches each data-parallel rank computes, 1 or more; () for as many each."""

    def __post_init__(self) -> None:
        for axis in ("pp", "dp", "tp", "cp", "replicas"):
            size = getattr(self, axis)
            if not isinstance(size, int) or size < 0:
                raise LayoutError(f"layout: {axis} must be a whole number, 0 for free or 1 and more; it is {size!r}")
        if self.zero not in (0, 1, 2, 3):
            raise LayoutError(f"layout: zero must be 1, 2 or 3, or 0 for free; it is {self.zero!r}")
        if self.replicas and self.dp % self.replicas:
            raise LayoutError(f"layout: {self.replicas} replicas cannot share dp={self.dp} evenly; let them divide it")
        if self.shares:
            self._check_shares()

    def _check_shares(self) -> None:
        wrong = [one for one in self.shares if not isinstance(one, int) or isinstance(one, bool) or one < 1]
        if wrong:
            raise LayoutError(f"layout: shares must be numbers of micro-batches, 1 or more; {wrong[0]!r} is not one")
        if len(self.shares) != self.dp:
            raise LayoutError(
                f"layout: shares={'/'.join(map(str, self.shares))} are of {len(self.shares)} data-parallel ranks, and "
                f"dp={self.dp}: give one for each, with dp={len(self.shares)}"
            )
        if self.pp > 1:
            raise LayoutError(
                f"layout: shares are for pp=1, and pp is {self.pp}: stages of unlike pipelines would wait for each "
                "other's turns; cuts gives a slow node's stage fewer blocks"
            )
        if self.zero == 3:
            raise LayoutError(
                "layout: with ZeRO-3 all data-parallel ranks gather parameters together in every round, so that none "
                "can have fewer than the others: use zero=2 with shares"
            )

    @property
    def world(self) -> int:
        """Number of ranks; 0 while an axis is free."""
        return self.pp * self.stage_ranks

    @property
    def stage_ranks(self) -> int:
        """Number of ranks at each place of the pipeline; 0 while an axis is free."""
        return self.dp * self.cp * self.tp

    @property
    def stages(self) -> int:
        """Number of pipeline stages over all ranks."""
        return self.pp * self.virtual

    @property
    def shards(self) -> int:
        """Number of data-parallel and context-parallel ranks that share one copy of the sharded state; 0 while free."""
        return self.dp * self.cp // self.replicas if self.replicas else 0

    def __str__(self) -> str:
        cp = "" if self.cp == 1 else f" x cp {self.cp}"
        words = [f"pp {self.pp} x dp {self.dp}{cp} x tp {self.tp}", f"ZeRO-{self.zero}"]
        if self.schedule is not None:
            words.append(f"{self.schedule} x{self.virtual}" if self.virtual > 1 else str(self.schedule))
        if self.replicas > 1:
            words.append(f"{self.replicas} replicas")
        if self.shares:
            words.append(f"shares {'/'.join(map(str, self.shares))}")
        return ", ".join(words)

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Return the layout that `pp=2,zero=3,schedule=zbv` asks for; fields left out are as in `Layout()`.

        cuts and shares are joined by `/`, as in cuts=3/5. LayoutError for anything else.
        """
        fields: dict[str, Any] = {}
        for part in text.split(","):
            name, equals, value = (word.strip() for word in part.partition("="))
            if not equals or name not in cls.__slots__ or name in fields:
                names = ", ".join(cls.__slots__)
                raise LayoutError(f"layout {text!r}: {part!r} is not one of {names}, each once, as in pp=2,zero=3")
            try:
                if name == "schedule":
                    fields[name] = Schedule(value)
                elif name in ("cuts", "shares"):
                    fields[name] = tuple(int(one) for one in value.split("/"))
                else:
                    fields[name] = int(value)
            except ValueError as error:
                kinds = f"one of {', '.join(Schedule)}" if name == "schedule" else "a whole number"
                raise LayoutError(f"layout {text!r}: {name} must be {kinds}, not {value!r}") from error
        return cls(**fields)

    def request(self) -> str:
        """Return the text that `parse` reads as this layout."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        fields |= {name: "/".join(map(str, fields[name])) for name in ("cuts", "shares")}
        default = Layout()
        return ",".join(f"{n}={v}" for n, v in fields.items() if v not in ("", getattr(default, n))) or "zero=3"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptActivations:
    """What a part keeps of one micro-batch between its forward and its backward, with one kind of recomputation.

    whole: bytes that each tensor-parallel rank keeps. cut: bytes that they share. again: forward FLOPs done again.
    """

    whole: int = 0
    cut: int = 0
    again: float = 0.0


def rounds(micro_batches: int, dp: int, leaf: int = 1, shares: tuple[int, ...] = ()) -> int:
    """Return how many micro-batches each of `dp` ranks runs in a step, whole leaves of them; some may not count.

    shares: as in a layout; then the number of rounds that the step has, which some ranks sit out.
    """
    turns = Owners(dp=dp, shares=shares).turns(micro_batches // leaf) if shares else -(-micro_batches // (leaf * dp))
    return turns * leaf


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPart:
    """The costs of a part of the model: the one before the blocks, one block, or the one after them.

    cut: how many of the parameters tp divides. flops: of the forward of one micro-batch; a backward is twice that.
    kept: by kind of recomputation, "none", "selective" or "full". workspace: bytes needed only while the part computes.
    """

    parameters: int = 0
    cut: int = 0
    flops: float = 0.0
    kept: dict[str, KeptActivations] = field(default_factory=dict)
    workspace: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BlankTensor:
    """What a module returns that only a pipeline's first stage has: a tensor of this shape and dtype."""

    module: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProvenChain:
    """A proof that a model can be cut into pipeline stages, for other processes that run the same code.

    shape, dtype: of the tensor between blocks. early, late: modules outside the blocks that only the first stage has,
    and those without parameters that only the last has. entry: key of what it is computed from in an input, None where
    that is the input. everywhere: whether every stage needs the input's values. image: names the code that was running,
    which forked processes share. forward: digest of the modules' forward.
    """

    shape: tuple[int, ...]
    dtype: str
    early: tuple[BlankTensor, ...]
    late: tuple[str, ...]
    entry: str | None
    everywhere: bool
    image: str
    forward: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelProfile:
    """What the planner needs to know about a model and its batches, measured before the first generation.

    digest: of names, shapes, dtypes, the batch sizes and the seed: nodes whose digests differ run different jobs. The
    fields after it may be unknown: without FLOPs no time is predicted, and layouts are chosen by shape alone.

    first, block, last: costs before the blocks, of one of them (their mean), after them. boundary: bytes that a stage
    passes to the next for one micro-batch. logits: bytes of the model's output for one micro-batch. heads: a number
    that tp must divide; 0 for a model without a tensor-parallel plan. tied: the first and the last part share a
    parameter. unstaged: why pipeline stages cannot pass on micro-batches of several shapes, "" if they can or there is
    one shape. held_bytes, compute_bytes, gradient_bytes, optimizer_bytes: per parameter, as it is held sharded, as
    forward and backward use it, of the gradients' sum, of the optimizer's state. recompute: the kind the run uses.
    counts: all numbers of micro-batches that a step may have, or those that stand for them (`Order.counts`); () for
    that one. multiple: of which all between are, 0 if there are no others. micro_batches: the smallest of them, or that
    of a usual step where a budget of tokens makes them. experts: a number that dp must divide if experts are spread
    over it; 0 if none are. compress, leaf: as in `run.shard`; the latter divides all numbers of micro-batches.
    chunks: into which sequences are cut, 1 for whole ones; cp divides it.
    audit: share of the computing that audits may take.
    script, code, schedule: digests of the script's own file, of what else the model is made of (`provenance.compared`),
    and of its optimizer and schedule; "" if not known.
    samples: digest of the first micro-batch; "" of a stream's, and where it is another one each time it is made.
    health: options of `health=` that all nodes must share, as "name=value".
    """

    blocks: int
    parameters: int
    micro_batches: int
    micro_batch: int
    digest: str
    first: ModelPart = field(default_factory=ModelPart)
    block: ModelPart = field(default_factory=ModelPart)
    last: ModelPart = field(default_factory=ModelPart)
    boundary: int = 0
    logits: int = 0
    heads: int = 0
    tied: bool = False
    unstaged: str = ""
    held_bytes: int = 4
    compute_bytes: int = 4
    gradient_bytes: int = 4
    optimizer_bytes: int = 8
    recompute: str = "none"
    reduction: str = "ordered"
    counts: tuple[int, ...] = ()
    multiple: int = 0
    experts: int = 0
    compress: str = ""
    script: str = ""
    code: str = ""
    schedule: str = ""
    samples: str = ""
    leaf: int = 1
    chunks: int = 1
    audit: float = 0.0
    health: tuple[str, ...] = ()

    @property
    def leaves(self) -> int:
        """Return the smallest number of leaves of any step, each of `leaf` micro-batches of one rank; or the usual."""
        return self.micro_batches // self.leaf

    @property
    def fewest(self) -> int:
        """Return the smallest number of leaves that any step may have."""
        return min(self.counts or (self.micro_batches,)) // self.leaf

    def rounds(self, dp: int, shares: tuple[int, ...] = ()) -> int:
        """Return how many micro-batches each of `dp` ranks runs in such a step; with shares, the one with most."""
        return rounds(self.micro_batches, dp, self.leaf, shares)

    @property
    def job(self) -> str:
        """Return what all nodes of a job have in common, its first word the digest of the model and the batches."""
        return " ".join((self.digest, self.script, self.schedule, *self.health)).rstrip()


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """What a node's trainers compute on, of one slot."""

    kind: str
    """"cpu" or "cuda", which is ROCm's as well."""
    name: str
    """What its maker calls it."""
    memory: int
    """Its bytes; of a CPU, a slot's share of the host's memory."""
    devices: int
    """How many of them this node has; of a CPU, cores."""
    torch: str
    """Version of torch."""
    runtime: str = ""
    """What torch was built for, such as "CUDA 12.8, cuDNN 91002"; on a CPU what its kernels are chosen for, and a
    digest of what some compute; "" where an older version did not say."""
    driver: str = ""
    """Version of the kernel's driver, "" where there is none or it does not say."""
    reserve: int = 0
    """Bytes that are not the model's: the context's, a standby's, and what others hold; 0 where it was not measured."""
    products: str = ""
    """In what products of float32 are computed, "" where there is no choice."""

    def unlike(self, other: DeviceFacts) -> tuple[str, str]:
        """Return what makes other bits of the same step, here and there; ("", "") where nothing is known to.

        CPUs go by any name: what they compute tells more of them.
        """
        pairs = [(self.kind, other.kind), (f"torch {self.torch}", f"torch {other.torch}")]
        if self.kind == other.kind != "cpu":
            pairs.insert(1, (self.name, other.name))
            pairs.append((f"products in {self.products}", f"products in {other.products}"))
        if self.runtime and other.runtime:
            pairs.append((self.runtime, other.runtime))
        return next(((mine, theirs) for mine, theirs in pairs if mine != theirs), ("", ""))


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One device place of a node: the TCP port, at the node's address, where its keeper serves tiles."""

    tile_port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One machine as a member: identity is (name, incarnation); ports belong to `address`.

    home: a name that stays the same when its processes are restarted, by which quarantine keeps it out; "" for `name`.
    """

    name: str
    incarnation: str
    address: str
    slots: tuple[Slot, ...]
    heartbeat_port: int = 0
    store_port: int = 0
    labels: dict[str, str] = field(default_factory=dict)
    home: str = ""

    @property
    def id(self) -> str:
        """The identity as one text, for keys and reports: no two processes ever share it."""
        return f"{self.name}@{self.incarnation}"

    @property
    def place(self) -> str:
        """The machine, whichever process speaks for it."""
        return self.home or self.name


class Cause(StrEnum):
    """Why a generation came to be."""

    START = "start"
    DEATH = "death"
    JOIN = "join"
    LEAVE = "leave"
    FAILURE = "failure"
    ERROR = "error"
    OUT_OF_MEMORY = "out_of_memory"
    DRAIN = "drain"
    QUARANTINE = "quarantine"
    STUCK = "stuck"
    LYING = "lying"
    BALANCE = "balance"
    SPIKE = "spike"

    @property
    def of_script(self) -> bool:
        """Whether the script raised, and may do so again: each time counts as a try."""
        return self in (Cause.ERROR, Cause.OUT_OF_MEMORY)

    @classmethod
    def _missing_(cls, value: object) -> Cause | None:
        """Return what a record written before meant by a word that is not used any more."""
        return cls.FAILURE if value == "fault" else None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreAt:
    """Where checkpoints are.

    url: path or URL. key: file with the key that encrypts them, "" for none. register: "etcd" if refs are decided in
    etcd, for a store that has no conditional writes; "" if the store decides. cache: folder on local disk that keeps
    tiles read from the store for all processes of the node, "" for none; cache_bytes: its limit. patience: seconds for
    which an operation is tried again while a store over a network is busy or away.
    """

    url: str
    key: str = ""
    register: str = ""
    cache: str = ""
    cache_bytes: int = 0
    patience: float = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One sealed (or, with attempt > 0 and under `proposal`, still proposed) membership.

    Rank r of the world is slot r % slots of active node r // slots. `attempt` tells proposals of one number apart.
    `job` must be the same on all nodes: `ModelProfile.job`. `tries` counts generations in a row that ended with the
    user's error, a dying trainer or a rank that stood still, without a step of progress beyond `tried_at`; `raised` are
    the ids of the nodes whose code raised in them, and `hung` counts those in which the script itself was found to
    stand still. `spent` is how much of the budget of re-formings is used, which decreases with time.
    `storm` counts generations in a row that a loss ended soon. `reached` is a step that was safe in memory, 0 while
    none was: not the newest one, but never below the first. `distrusted` are rules for states it may not go on from,
    `paces` what was known of machines that are slow, or were. `memory` is what was learned where memory ran out, None
    where it never did.
    `rollbacks` what it leaves out since the loss jumped up. `convicted` are the nodes of which a device was found to
    compute wrongly, by id, each with the number of the newest generation in which it was: who says so later says
    nothing new.
    `writer` is the place among `nodes` of the one that writes the run's curves: the one that did so before, else the
    first that trained before and so heard the steps that may not be written yet, else the first.
    """

    number: int
    attempt: int = 0
    cause: Cause
    nodes: tuple[Node, ...]
    spares: tuple[Node, ...] = ()
    layout: Layout | None = None
    leader: str = ""
    detail: str = ""
    job: str = ""
    tries: int = 0
    tried_at: int = -1
    raised: tuple[str, ...] = ()
    hung: int = 0
    spent: float = 0.0
    storm: int = 0
    reached: int = 0
    distrusted: tuple[Distrust, ...] = ()
    rollbacks: tuple[Rollback, ...] = ()
    paces: tuple[Pace, ...] = ()
    memory: MemoryBound | None = None
    writer: int = 0
    convicted: dict[str, int] = field(default_factory=dict)

    @property
    def world(self) -> int:
        """Number of ranks."""
        return sum(len(node.slots) for node in self.nodes)

    @property
    def key(self) -> str:
        """A prefix for stores: two attempts never meet under one key."""
        return f"{self.number}.{self.attempt}"

    @property
    def node_of_rank(self) -> tuple[Node, ...]:
        """The node of each rank, in their order."""
        return tuple(node for node in self.nodes for _ in node.slots)

    def first_rank(self, name: str, incarnation: str) -> int | None:
        """Return the rank of the node's first slot; None if the node is not active in this generation."""
        rank = 0
        for node in self.nodes:
            if node.name == name and node.incarnation == incarnation:
                return rank
            rank += len(node.slots)
        return None


HERE = {"here": True}
"""Metadata of a dataclass's field that stays in its process: it has a default, and is left out of what is written."""


def to_json(value: Any) -> Any:
    """Return `value` as plain JSON data (dict, list, str, int, float, bool, None)."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if dataclasses.is_dataclass(kind):
        return {name: to_json(getattr(value, name)) for name in _names(kind)}
    if isinstance(value, dict):
        return {str(k): to_json(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(v) for v in value]
    if isinstance(value, StrEnum):
        return value.value
    return value


_PLAIN = (str, int, float, bool, type(None))


@functools.cache
def _names(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in written_fields(kind))


def written_fields(kind: Any) -> list[dataclasses.Field[Any]]:
    """Return the fields of a dataclass that are written, all but those that stay in their process."""
    return [field for field in dataclasses.fields(kind) if not field.metadata.get("here")]


def from_json(kind: type[T], data: Any) -> T:
    """Return the `kind` that `to_json` wrote as `data`; ValueError or TypeError if it does not fit."""
    return typing.cast(T, _reader(typing.cast(Any, kind))(data))


@functools.cache
def _reader(kind: Any) -> Callable[[Any], Any]:
    """Return the reader of a `kind`, made once: all agents read a generation's record at the same moment."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        inner = _reader(next(a for a in arguments if a is not type(None)))
        return lambda data: None if data is None else inner(data)
    if origin is tuple:
        item = _reader(arguments[0])
        return lambda data: tuple(map(item, _expect(list, "a list", data)))
    if origin is dict:
        value = _reader(arguments[1])
        return lambda data: {k: value(v) for k, v in _expect(dict, "an object", data).items()}
    if dataclasses.is_dataclass(kind):
        return _dataclass_reader(typing.cast(type, kind))
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return kind
    if kind is Any:
        return lambda data: data
    return lambda data: _plain(kind, data)


def _dataclass_reader(kind: type) -> Callable[[Any], Any]:
    hints = typing.get_type_hints(kind)
    known = {f.name: _reader(hints[f.name]) for f in written_fields(kind) if f.init}
    what = f"an object for {kind}"

    def read(data: Any) -> Any:
        return kind(**{k: known[k](v) for k, v in _expect(dict, what, data).items() if k in known})

    return read


def _expect(kind: type, what: str, data: Any) -> Any:
    if not isinstance(data, kind):
        raise ValueError(f"expected {what}, got {data!r}")
    return data


def _plain(kind: Any, data: Any) -> Any:
    if type(data) is kind:
        return data
    if kind is float and isinstance(data, int) and not isinstance(data, bool):
        return float(data)
    if not isinstance(data, kind) or (kind is int and isinstance(data, bool)):
        raise ValueError(f"expected {kind.__name__}, got {data!r}")
    return data

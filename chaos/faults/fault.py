"""What a fault is: a small value that says what happens, to whom and when, and that makes it happen to a job.

Each kind of fault says of itself where it enters, what is promised when it happens and by which page, who notices it
and how soon, and what it needs of the machine: `About`.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from random import Random
from types import MappingProxyType
from typing import Any, ClassVar, Self

from chaos.faults.live import LiveJob
from chaos.faults.moment import When
from chaos.history.follow import Event, Picture
from elastic3d.errors import UsageError

NEWEST = "newest"
"""Of a fault's node: the one that joined last."""
LONGEST = 86400.0
"""Most seconds for which anything lasts, or is late: a day."""


class Place(StrEnum):
    """Where a fault enters."""

    PROCESS = "process"
    ORDERS = "orders"
    NETWORK = "network"
    ETCD = "etcd"
    STORE = "store"
    DISK = "disk"
    MEMORY = "memory"
    DEVICE = "device"
    CLOCK = "clock"
    DATA = "data"
    CODE = "code"


class Need(StrEnum):
    """What a fault needs that not every machine or job has."""

    S3 = "an S3 server"
    SLOTS = "two slots a node"
    MEMBERS = "an etcd of three members"
    QUOTA = "an etcd with a quota"
    PASSWORD = "an etcd with a password"
    CERTIFICATES = "openssl"
    FUSE = "FUSE"
    SCRIPT = "chaos/scripts/train_faulty.py"
    HOSTS = "root and iproute2"
    COMPILER = "gcc"
    GROUP = "root and control groups"
    MOUNTS = "root and tmpfs"
    VECTORS = "a processor with AVX2"


class Replay(StrEnum):
    """How exactly a fault happens again."""

    EXACT = "exact"
    """At the same place of the program."""
    NEAR = "near"
    """After the same event, as soon as it is seen: within some milliseconds."""
    TIMED = "timed"
    """After the same event, and for real seconds: how much of the job they cover depends on its speed."""


class Ends(StrEnum):
    """The most that may end by a fault."""

    NOTHING = "no generation"
    """Training goes on in the same generation."""
    GENERATION = "a generation"
    """All its nodes are in the next one, with whoever joins."""
    NODE = "a node"
    """The one that it happens to; any, where it happens to none."""
    JOB = "the job"
    """All its nodes, by one error; what has been saved stays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """What the catalogue says of a kind of fault.

    enters: by which public seam. promised: what holds when it happens. row: the failure of docs/reference/failures.md
    that promises it, by its first cell, or "" where `page`, of docs/, is another one. detector: the event that names
    it, "" where nothing may be said. bar: seconds until it is said, 0 for none. needs: beside a machine and a job.
    spreads: others than the node that it happens to may be named for it, or lost. ends: the most that may end by it.
    again: only steps since the newest snapshot are made again. sure: its detector comes across it in any job, also in
    one whose nodes share the processors, or write nothing while it lasts. says: patterns of what the error has to say,
    every one of them, by which the node that it happens to ends, or with Ends.JOB the job; none where nobody ends by an
    error. unless: what keeps the job from ending by it, "" where nothing does: then nothing comes after it.
    """

    place: Place
    enters: str
    promised: str
    row: str = ""
    page: str = "reference/failures.md"
    detector: str = ""
    bar: float = 0.0
    needs: frozenset[Need] = frozenset()
    replay: Replay = Replay.NEAR
    spreads: bool = False
    ends: Ends = Ends.NODE
    again: bool = False
    sure: bool = True
    says: tuple[str, ...] = ()
    unless: str = ""

    @property
    def fatal(self) -> bool:
        """Whether the job ends by it for certain."""
        return self.ends is Ends.JOB and not self.unless


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault(ABC):
    """Something that happens to a job. WORD names its kind; CHANGES: nodes that are lost, -1, and come, 1, by it.

    LEAST_NODES: with fewer in the job it never happens. LEAVES_OUT: whether samples are left out for good, so that the
    bits are those of a run that knew of them. RAISES: whether the script raises by it. LASTING: nothing undoes it,
    though it has `seconds`.
    """

    WORD: ClassVar[str]
    ABOUT: ClassVar[About]
    CHANGES: ClassVar[tuple[int, ...]] = ()
    LEAST_NODES: ClassVar[int] = 1
    LEAVES_OUT: ClassVar[bool] = False
    RAISES: ClassVar[bool] = False
    LASTING: ClassVar[bool] = False

    when: When

    @property
    def lasts(self) -> float:
        """Seconds after which it is undone, infinite where nothing undoes it."""
        return float(not self.LASTING and getattr(self, "seconds", 0.0)) or math.inf

    @abstractmethod
    def make(self, job: LiveJob) -> bool:
        """Make it happen; return False where that is not possible yet."""

    def arguments(self) -> tuple[str, ...]:
        """Return what the job's script is started with for it."""
        return ()

    def conf(self) -> Mapping[str, str]:
        """Return what the job's nodes are started with for it, of --rdzv-conf."""
        return MappingProxyType({})

    def spared(self, events: Sequence[Event], at: float) -> bool:
        """Return whether the job goes on though Ends.JOB: by all of its events, for one that was made at that time."""
        return False

    def says(self, events: Sequence[Event], at: float) -> tuple[str, ...]:
        """Return patterns of what has to be said by whoever ends by it: as `spared`."""
        return self.ABOUT.says

    def check(self) -> None:  # noqa: B027 (most faults have nothing to check)
        """Raise UsageError where its own values make no sense."""

    @classmethod
    def drawn(cls, chance: Random, *, nodes: int, steps: int) -> Self:
        """Return one for a job of so many nodes and steps."""
        return cls(when=When(step=chance.randrange(1, steps)))

    def __str__(self) -> str:
        return f"{' '.join((self.WORD, *values(self)))} {self.when}"


@dataclass(frozen=True, slots=True, kw_only=True)
class OfNode(Fault):
    """Something that happens to one node: `node1`, `leader`, `stage0`, `rank3`, the node that has that rank, or the one
    that joined last, `newest`."""

    FIXED: ClassVar[bool] = False
    """Whether the node has to be named, since who has a role may change."""

    node: str

    def make(self, job: LiveJob) -> bool:
        """Do it to the node that is meant now."""
        name = resolve(self.node, job.picture)
        if name is None:
            return False
        try:
            node = job.cluster.node(name)
        except KeyError:
            # It is started when it shall come.
            return False
        # The present leader may be dead already; then its successor is meant, once there is one. Nor is it one that
        # waits to come.
        if node.held or node.killed or not node.alive:
            return False
        return self.make_to(job, name)

    @abstractmethod
    def make_to(self, job: LiveJob, name: str) -> bool:
        """Do it to this node, which lives; return False where that is not possible yet."""

    def check(self) -> None:
        """Refuse what is no node."""
        # As the cluster names its nodes: node01 is none.
        if not re.fullmatch(r"(node|rank)(0|[1-9][0-9]{0,5})|leader|stage0|newest", self.node):
            raise UsageError(
                f"{self}: {self.node!r} is no node; give node0, node1..., leader, stage0, newest or rank0, rank1..."
            )
        if self.FIXED and not self.node.startswith("node"):
            raise UsageError(f"{self}: name the node by its number; who is {self.node} may change")

    @classmethod
    def drawn(cls, chance: Random, *, nodes: int, steps: int) -> Self:
        """Return one of any node or role."""
        roles = () if cls.FIXED else ("leader", "stage0")
        node = chance.choice((*map(node_name, range(nodes)), *roles))
        given: dict[str, Any] = {"node": node, "when": When(step=chance.randrange(1, steps))}
        return cls(**given)

    def __str__(self) -> str:
        own = tuple(values(self))
        return f"{' '.join((self.WORD, self.node, *own))}{' ' if own else ''}{self.when}"


def values(fault: Fault, *besides: str) -> Iterator[str]:
    """Yield what tells a fault from others of its kind, as schedules have it: `seconds=5`.

    Not its moment and its node, nor `besides`, which are said otherwise; nor a 0 or "" that stands for nothing special.
    """
    for field in dataclasses.fields(fault):
        value = getattr(fault, field.name)
        plain = not value and value == field.default
        if field.name not in ("when", "node", *besides) and not plain:
            yield f"{field.name}={value:g}" if isinstance(value, float) else f"{field.name}={value}"


def check_seconds(fault: Fault, seconds: float) -> None:
    """Raise UsageError where nothing can last for so long."""
    if not 0 < seconds <= LONGEST:
        raise UsageError(f"{fault}: it must be for more than 0 s, and for {LONGEST:g} s (a day) at most")


def node_name(number: int) -> str:
    """Return the name of the cluster's node `number`, counted from 0."""
    return f"node{number}"


def newest(picture: Picture) -> str | None:
    """Return the node that joined a job last: of the newest generation that has one that was in none just before it.

    None where nobody has joined since the first one was formed. Where several have at once, it is the last one named.
    """
    for before, view in reversed([*itertools.pairwise(picture.generations)]):
        members = {*before.nodes, *before.spares}
        came = [node for node in (*view.nodes, *view.spares) if node not in members]
        if came:
            return came[-1]
    return None


def resolve(node: str, picture: Picture) -> str | None:
    """Return the name of the node that `node` means now; None while no generation says, or nobody has joined yet."""
    if node.startswith("node"):
        return node
    view = picture.generation
    if view is None:
        return None
    if node == "leader":
        return view.leader
    if node == NEWEST:
        return newest(picture)
    slots = max(1, view.world // len(view.nodes))
    at = (0 if node == "stage0" else int(node.removeprefix("rank"))) // slots
    return view.nodes[at] if at < len(view.nodes) else None

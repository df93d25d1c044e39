"""What people, schedulers and clouds order: nodes come, are sent away, or are taken."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from random import Random
from types import MappingProxyType
from typing import ClassVar, Self

from chaos.faults.fault import About, Ends, Fault, Need, OfNode, Place, check_seconds, node_name
from chaos.faults.live import LiveJob
from chaos.faults.moment import When
from chaos.machine.small_disk import SmallDisk
from chaos.servers.metadata import Provider

_ORDERLY = "the others prepare beside the running generation and all switch at a step boundary; no step again"
_TOLD = "a node is told to leave: spot notice, SIGTERM, `elastic3d drain`"


class Coming(Fault):
    """A fresh node, started early and held, comes.

    ENVIRONMENT: of its processes alone. UNWANTED: it takes no part, and ends with an error.
    """

    ENVIRONMENT: ClassVar[Mapping[str, str]] = MappingProxyType({})
    UNWANTED: ClassVar[bool] = False

    def make(self, job: LiveJob) -> bool:
        """Let the next one of its kind go on."""
        job.release(self.WORD)
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Join(Coming):
    """A fresh node, started early and held, is let in."""

    WORD = "join"
    CHANGES = (1,)
    ABOUT = About(
        place=Place.ORDERS,
        enters="`--rdzv-conf=gate=`: an agent that waits for a file",
        promised="its trainers are built beside the running ones, then all switch at a step boundary; no step again",
        row="a node joins",
        detector="member.joined",
        ends=Ends.GENERATION,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinUnfit(Coming):
    """A fresh node on whose disk nothing can be written would join."""

    WORD = "join-unfit"
    UNWANTED = True
    ABOUT = About(
        place=Place.ORDERS,
        enters="a full tmpfs over the node's TMPDIR",
        promised="it says why and never joins; the others do not notice",
        row="a node is not fit: wrong sums, no memory, a full disk, unreachable",
        detector="admission.failed",
        bar=10.0,
        needs=frozenset({Need.MOUNTS}),
        ends=Ends.NOTHING,
    )

    def make(self, job: LiveJob) -> bool:
        """Take its disk's room, and let it go on."""
        over = ExitStack()
        over.enter_context(SmallDisk(job.cluster.node(job.held(self.WORD)).temp)).fill()
        job.at_end(over.close)
        return Coming.make(self, job)


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinOther(Coming):
    """A fresh node whose torch computes as on an older processor would join."""

    WORD = "join-other"
    UNWANTED = True
    ENVIRONMENT = MappingProxyType({"ATEN_CPU_CAPABILITY": "default"})
    ABOUT = About(
        place=Place.ORDERS,
        enters="torch's ATEN_CPU_CAPABILITY=default in the node's environment",
        promised="it is refused by name, since the same step would give other bits there",
        row="a node with another kind or model of device, torch, CUDA or precision of products joins",
        detector="job.ended",
        bar=10.0,
        needs=frozenset({Need.VECTORS}),
        ends=Ends.NOTHING,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Late(Coming):
    """A node that was started in time comes once the job is done, at its moment or after it."""

    WORD = "late"
    ABOUT = About(
        place=Place.ORDERS,
        enters="`--rdzv-conf=gate=`: an agent that waits for a file",
        promised="it says so and ends with 0",
        row="a node starts when its job is already done",
        detector="job.ended",
        bar=10.0,
        ends=Ends.NOTHING,
    )

    def make(self, job: LiveJob) -> bool:
        """Let it go on; not before the job is done."""
        return job.over() and Coming.make(self, job)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain(OfNode):
    """An operator's order to leave within `seconds`, in etcd."""

    WORD = "drain"
    LASTING = True
    CHANGES = (-1,)
    seconds: float = 25.0
    ABOUT = About(
        place=Place.ORDERS,
        enters="the record in etcd that `elastic3d drain` writes",
        promised=_ORDERLY,
        row=_TOLD,
        detector="node.draining",
    )

    def make_to(self, job: LiveJob, name: str) -> bool:
        """Give the order; not while etcd is away."""
        return job.order_drain(name, self.seconds)

    def check(self) -> None:
        """Refuse a time that is none."""
        OfNode.check(self)
        check_seconds(self, self.seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Terminate(OfNode):
    """SIGTERM to a node's agent, as a scheduler sends it."""

    WORD = "sigterm"
    CHANGES = (-1,)
    ABOUT = About(
        place=Place.ORDERS, enters="SIGTERM to the agent", promised=_ORDERLY, row=_TOLD, detector="node.draining"
    )

    def make_to(self, job: LiveJob, name: str) -> bool:
        """Send it."""
        job.note("sigterm", name)
        job.cluster.terminate_node(name)
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Announce(OfNode):
    """The node's cloud says that it takes the machine."""

    WORD = "notice"
    CHANGES = (-1,)
    FIXED = True
    cloud: Provider = Provider.GCP
    ABOUT = About(
        place=Place.ORDERS,
        enters="a metadata server that answers like that of gcp, aws or azure, by `--rdzv-conf=notices_url=`",
        promised=_ORDERLY,
        row=_TOLD,
        detector="notice.heard",
    )

    @classmethod
    def drawn(cls, chance: Random, *, nodes: int, steps: int) -> Self:
        """Return one of any cloud."""
        node, when = node_name(chance.randrange(nodes)), When(step=chance.randrange(1, steps))
        return cls(node=node, when=when, cloud=chance.choice(list(Provider)))

    def make_to(self, job: LiveJob, name: str) -> bool:
        """Announce it."""
        job.note("notice", name)
        job.preempt(name)
        return True


KINDS = (Join, JoinUnfit, JoinOther, Late, Drain, Terminate, Announce)

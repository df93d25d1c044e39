"""What people, schedulers and clouds order: nodes come, are sent away, or are taken."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Self

from chaos.faults.fault import About, Ends, Fault, OfNode, Place, check_seconds, node_name
from chaos.faults.live import LiveJob
from chaos.faults.moment import When
from chaos.servers.metadata import Provider

_ORDERLY = "the others prepare beside the running generation and all switch at a step boundary; no step again"
_TOLD = "a node is told to leave: spot notice, SIGTERM, `elastic3d drain`"


@dataclass(frozen=True, slots=True, kw_only=True)
class Join(Fault):
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

    def make(self, job: LiveJob) -> bool:
        """Let the next one in."""
        job.release()
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain(OfNode):
    """An operator's order to leave within `seconds`, in etcd."""

    WORD = "drain"
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


KINDS = (Join, Drain, Terminate, Announce)

"""Faults of connections: between nodes that are hosts of their own, and between ranks."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from chaos.faults.code import NAMED, STUCK
from chaos.faults.data import SLOW
from chaos.faults.fault import About, Ends, Need, OfNode, Place, Replay, check_seconds, values
from chaos.faults.live import LiveJob
from chaos.faults.script import InScript, about
from chaos.machine.impairments import Impairment
from chaos.machine.network import Network
from chaos.machine.processes import Part
from chaos.machine.strangers import How, Stranger, sockets
from elastic3d.errors import UsageError

_APART = "two nodes cannot reach each other, or only in one direction, and all others reach both"
_HOSTS = frozenset({Need.HOSTS})


@dataclass(frozen=True, slots=True, kw_only=True)
class Blackhole(InScript):
    """Nothing arrives any more on the connections of a rank, in one direction only."""

    WORD = "blackhole"
    ABOUT = about(
        Place.NETWORK,
        "a filter on its sockets that drops what arrives",
        f"{NAMED}; of more than two in a group nothing says whose connection it is",
        STUCK,
        "rank.stuck",
        5.0,
        spreads=True,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class OfConnection(OfNode):
    """Something that lasts for `seconds` on a node's connections."""

    seconds: float = 8.0

    def check(self) -> None:
        """Refuse a time that is none."""
        OfNode.check(self)
        check_seconds(self, self.seconds)

    def __str__(self) -> str:
        own = " ".join((self.WORD, self.node, *values(self, "seconds")))
        return f"{own} for {self.seconds:g} s {self.when}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut(OfConnection):
    """The cable of a node is pulled for `seconds`: no end of file, no refusal, no etcd."""

    WORD = "cut"
    CHANGES = (-1, 1)
    ABOUT = About(
        place=Place.NETWORK,
        enters="the end of its cable, which is on no bridge meanwhile",
        promised="its neighbours miss it and agree, then as for a death; it finds itself fenced and joins again",
        row="a node falls silent: all its processes stop, or its network is cut",
        detector="generation.sealed",
        bar=10.0,
        needs=_HOSTS,
        replay=Replay.TIMED,
        again=True,
    )

    def make_to(self, job: LiveJob, name: str) -> bool:
        """Pull it; not while something else is done to it."""
        if not job.network.plugged(name):
            return False
        job.note("cut", name)
        job.network.cut(name)
        job.later(self.seconds, lambda: job.network.mend(name))
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class CutFromEtcd(OfConnection):
    """What a node sends to etcd is lost for `seconds`; its peers hear it."""

    WORD = "cut-from-etcd"
    CHANGES = (-1, 1)
    seconds: float = 20.0
    ABOUT = About(
        place=Place.NETWORK,
        enters="an entry of its neighbour table: an Ethernet address that nobody has",
        promised="it stops its trainers, and the others go on without it after its lease and its grace",
        row="etcd is away for one node only",
        detector="etcd.lost",
        bar=10.0,
        needs=_HOSTS,
        replay=Replay.TIMED,
    )

    def make_to(self, job: LiveJob, name: str) -> bool:
        """Lose it."""
        job.note("cut from etcd", name)
        job.network.unlink(name)
        job.later(self.seconds, lambda: job.network.link(name))
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class CutFromPeers(OfConnection):
    """A node and all others lose what they send each other for `seconds`; etcd hears all of them."""

    WORD = "cut-from-peers"
    CHANGES = (-1, 1)
    seconds: float = 20.0
    ABOUT = About(
        place=Place.NETWORK,
        enters="entries of all neighbour tables: an Ethernet address that nobody has",
        promised="its neighbours miss it and agree, then as for a death, though it still reaches etcd",
        row="a node falls silent: all its processes stop, or its network is cut",
        detector="generation.sealed",
        bar=10.0,
        needs=_HOSTS,
        replay=Replay.TIMED,
        spreads=True,
    )

    def make_to(self, job: LiveJob, name: str) -> bool:
        """Lose it, both ways; not where nobody else is there."""
        network = job.network
        others = [other for other in network.hosts if other != name]
        if not others:
            return False
        job.note(self.WORD, name)
        lost = [pair for other in others for pair in ((name, other), (other, name))]
        for sender, receiver in lost:
            network.unlink(sender, receiver)

        def link() -> None:
            for sender, receiver in lost:
                network.link(sender, receiver)

        job.later(self.seconds, link)
        return True


def next_node(job: LiveJob, name: str) -> str | None:
    """Return the node after this one in rank order, None while no generation says."""
    nodes = () if job.picture.generation is None else job.picture.generation.nodes
    return nodes[(nodes.index(name) + 1) % len(nodes)] if name in nodes and len(nodes) > 1 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class OfLink(OfConnection):
    """Something that lasts for `seconds` on the connection from a node to the one after it in rank order."""

    LEAST_NODES = 2

    def make_to(self, job: LiveJob, name: str) -> bool:
        """Do it; not while no generation says which node comes next."""
        peer = next_node(job, name)
        if peer is None:
            return False
        job.note(self.WORD, f"{name} to {peer}")
        job.later(self.seconds, self.lose(job.network, name, peer))
        return True

    @abstractmethod
    def lose(self, network: Network, name: str, peer: str) -> Callable[[], object]:
        """Do it, and return what undoes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OneWay(OfLink):
    """What a node sends to the next one is lost for `seconds`; the other direction, and all others, are well."""

    WORD = "one-way"
    seconds: float = 40.0
    ABOUT = About(
        place=Place.NETWORK,
        enters="an entry of its neighbour table: an Ethernet address that nobody has",
        promised="one of the two stands aside until they have reached each other for a minute",
        row=_APART,
        needs=_HOSTS,
        replay=Replay.TIMED,
        spreads=True,
    )

    def lose(self, network: Network, name: str, peer: str) -> Callable[[], object]:
        """Lose what one sends to the other."""
        network.unlink(name, peer)
        return lambda: network.link(name, peer)


@dataclass(frozen=True, slots=True, kw_only=True)
class Refuse(OfLink):
    """A firewall refuses what a node dials on the next one, for `seconds`; both reach all others."""

    WORD = "refuse"
    seconds: float = 40.0
    ABOUT = About(
        place=Place.NETWORK,
        enters="the other's address on its own loopback device, where nobody listens",
        promised="it is no death; where their trainers have to reach each other, one stands aside",
        row="a firewall refuses one node's connections to another that lives",
        needs=_HOSTS,
        replay=Replay.TIMED,
        spreads=True,
    )

    def lose(self, network: Network, name: str, peer: str) -> Callable[[], object]:
        """Refuse what one dials on the other."""
        network.refuse(name, peer)
        return lambda: network.accept(name, peer)


@dataclass(frozen=True, slots=True, kw_only=True)
class OfCable(OfConnection):
    """Something that a node's cable does for `seconds` to all that it sends and gets."""

    seconds: float = 10.0

    @abstractmethod
    def impairment(self) -> Impairment:
        """Return what it does."""

    def make_to(self, job: LiveJob, name: str) -> bool:
        """Do it; not while another one does something, or the cable is pulled."""
        if not job.network.plugged(name):
            return False
        job.note(self.WORD, name)
        job.network.impair(name, self.impairment())
        job.later(self.seconds, lambda: job.network.repair(name))
        return True


def _of_cable(promised: str) -> About:
    return About(
        place=Place.NETWORK,
        enters="a thread that passes frames between its cable and the bridge",
        promised=promised,
        row=SLOW,
        needs=_HOSTS,
        replay=Replay.TIMED,
        spreads=True,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Delay(OfCable):
    """All that a node sends and gets is `late` seconds later for `seconds`."""

    WORD = "delay"
    late: float = 0.05
    ABOUT = _of_cable("steps take longer, and no step is lost")

    def check(self) -> None:
        """Refuse a time that is none."""
        OfConnection.check(self)
        if not 0 < self.late <= 1:
            raise UsageError(f"{self}: late by more than 0 s, and by 1 s at most")

    def impairment(self) -> Impairment:
        """Return it."""
        return Impairment(late=self.late)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss(OfCable):
    """A `share` of the packets that a node sends and gets is lost for `seconds`."""

    WORD = "loss"
    share: float = 0.02
    ABOUT = _of_cable("TCP sends them again: steps take longer, and no step is lost")

    def check(self) -> None:
        """Refuse a share that is none."""
        OfConnection.check(self)
        if not 0 < self.share < 1:
            raise UsageError(f"{self}: share= is above 0 and below 1")

    def impairment(self) -> Impairment:
        """Return it."""
        return Impairment(loss=self.share)


@dataclass(frozen=True, slots=True, kw_only=True)
class Narrow(OfCable):
    """A node's cable carries `megabits` a second in each direction for `seconds`."""

    WORD = "narrow"
    megabits: float = 20.0
    ABOUT = _of_cable("steps take longer, and no step is lost")

    def check(self) -> None:
        """Refuse what carries nothing, and what is not narrow."""
        OfConnection.check(self)
        if not 0 < self.megabits <= 1e5:
            raise UsageError(f"{self}: megabits= is above 0, and 100000 at most")

    def impairment(self) -> Impairment:
        """Return it."""
        return Impairment(rate=self.megabits * 1e6 / 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class HalfOpen(OfCable):
    """What is on the connections that a node has is lost for `seconds`, both ways; new ones are well."""

    WORD = "half-open"
    seconds: float = 40.0
    ABOUT = About(
        place=Place.NETWORK,
        enters="a thread that passes frames between its cable and the bridge, except those of these connections",
        promised="no death: the same nodes form the next generation with fresh trainers",
        row="the connections of a node carry nothing any more, and new ones are well",
        detector="generation.sealed",
        bar=10.0,
        needs=_HOSTS,
        replay=Replay.TIMED,
        spreads=True,
    )

    def impairment(self) -> Impairment:
        """Return it."""
        return Impairment(forgets=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reset(OfNode):
    """All TCP connections between a node and the one after it in rank order are reset."""

    WORD = "reset"
    LEAST_NODES = 2
    ABOUT = About(
        place=Place.NETWORK,
        enters="`ss -K` on that host",
        promised="no death: the same nodes form the next generation with fresh trainers",
        row="the connections between two nodes break, and both live",
        needs=_HOSTS,
        spreads=True,
    )

    def make_to(self, job: LiveJob, name: str) -> bool:
        """Do it; not while no generation says which node comes next, or they have no connections."""
        peer = next_node(job, name)
        if peer is None or not job.network.connections(name, peer):
            return False
        # Before it is done: what follows from it may be noticed at once.
        job.note(self.WORD, f"{name} to {peer}")
        job.network.reset(name, peer)
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Strange(OfConnection):
    """Somebody without the run's secret connects to a node for `seconds`, again and again, and says nothing or garbage.

    how: `silent`, `garbage`, or `flood`, which is some hundred connections a second.
    """

    WORD = "stranger"
    how: How = How.GARBAGE
    ABOUT = About(
        place=Place.NETWORK,
        enters="all TCP ports on which the node's keepers listen",
        promised="its connections are closed within 2 s, and nothing else comes of them",
        row="a stranger connects to a port of elastic3d",
        detector="peer.refused",
        bar=5.0,
        replay=Replay.TIMED,
        ends=Ends.NOTHING,
    )

    def make_to(self, job: LiveJob, name: str) -> bool:
        """Connect; not yet where nobody listens."""
        ports = sockets(job.cluster.node(name).processes(Part.KEEPERS)).values()
        if ports:
            job.note(self.WORD, name)
            job.later(self.seconds, Stranger(ports, self.how).close)
        return bool(ports)


KINDS = (Cut, CutFromEtcd, CutFromPeers, OneWay, Refuse, Reset, HalfOpen, Delay, Loss, Narrow, Strange, Blackhole)

"""A running job as faults reach it: the seams that they enter by."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from chaos.history.follow import Picture

if TYPE_CHECKING:
    from chaos.faults.fault import Fault
    from chaos.machine.clocks import Clocks
    from chaos.machine.cluster import Cluster
    from chaos.machine.hung_files import HungFiles
    from chaos.machine.network import Network
    from chaos.machine.small_disk import SmallDisk
    from chaos.machine.spoilt_file import SpoiltFile
    from chaos.servers.etcd import EtcdCluster, EtcdServer
    from chaos.servers.s3_proxy import Harm


class LiveJob(Protocol):
    """A running job, as far as faults reach it."""

    @property
    def picture(self) -> Picture:
        """What has happened to it so far."""
        ...

    @property
    def cluster(self) -> Cluster:
        """Its nodes."""
        ...

    @property
    def own_etcd(self) -> EtcdCluster:
        """Its etcd."""
        ...

    @property
    def own_server(self) -> EtcdServer:
        """The same where it has one member, whose data may be replaced."""
        ...

    @property
    def network(self) -> Network:
        """What connects its nodes, where each is a host of its own."""
        ...

    @property
    def clocks(self) -> Clocks:
        """The wall clocks of its nodes, where each has one of its own."""
        ...

    @property
    def store_folder(self) -> str:
        """The folder of a store on disk."""
        ...

    @property
    def hung_files(self) -> HungFiles:
        """The file system that does not answer, where the job's script is given one."""
        ...

    @property
    def store_disk(self) -> SmallDisk:
        """The file system that this folder is on, where it has one of its own."""
        ...

    def events_disk(self, name: str) -> SmallDisk:
        """Return the file system that a node's events are written to, where each node has one of its own."""
        ...

    def events_file(self, name: str) -> SpoiltFile:
        """Return the file that a node's events are written to, where its writes can be spoilt."""
        ...

    def marked(self, step: int) -> str | None:
        """Return the node on which the script has failed by itself at a step, None while it has not."""
        ...

    def note(self, kind: str, node: str = "") -> None:
        """Write down that something is done to it now."""
        ...

    def later(self, seconds: float, action: Callable[[], object]) -> None:
        """Do something after so many seconds, or at the end of the job if that comes first."""
        ...

    def harm(self, fault: Fault, harm: Harm) -> None:
        """Have what stands before its store do something to requests, for a fault."""
        ...

    def happens(self, fault: Fault) -> bool:
        """Note that what was begun before happens only now; return False where the job has ended before.

        Then it does not happen.
        """
        ...

    def start(self, name: str) -> None:
        """Start a node, again if it was killed."""
        ...

    def held(self, word: str) -> str:
        """Return the node that comes next by faults of a kind."""
        ...

    def release(self, word: str) -> None:
        """Let that node go on."""
        ...

    def over(self) -> bool:
        """Return whether its end stands in etcd: nodes that leave or are turned away end before it."""
        ...

    def preempt(self, name: str) -> None:
        """Have a node's cloud say that it takes the machine."""
        ...

    def revoke(self, name: str) -> bool:
        """End the lease of a node's member key; return False where it has none now."""
        ...

    def at_end(self, action: Callable[[], object]) -> None:
        """Do something at the end of the job."""
        ...

    def delete_keys(self) -> bool:
        """Delete all its keys from etcd; return False where it has none now."""
        ...

    @property
    def password_file(self) -> Path:
        """The file from which its nodes read etcd's password, where it has one."""
        ...

    def order_drain(self, name: str, seconds: float) -> bool:
        """Order a node to leave; return False while etcd takes no orders."""
        ...

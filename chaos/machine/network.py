"""Hosts of their own on this machine: network namespaces on one bridge, whose cables can be pulled, or impaired.

Packets from one host to one other can be lost as well: they go to an Ethernet address that nobody has. Or refused:
they go no further than the sender. Or the connections between the two are reset.

Needs root and iproute2. Addresses are from 198.18.0.0/15, which is set aside for such tests.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import random
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Self

from chaos.machine.impairments import Connection, End, ImpairedCable, Impairment
from chaos.machine.makers import has_ended, maker
from chaos.machine.processes import wait_until

DEVICE = "eth0"
"""What a host calls its end of its cable."""
TRIES = 20
_ETHERNET = "02:e3:d0:00:00:01"
"""The bridge's own Ethernet address. Without one it has the lowest of its ports', which a host that is added changes:
what those before it then send goes to an address that is no longer the bridge's, until they ask again, half a minute
later."""
_BRIDGE = "br"
_LINKS = Path("/sys/class/net")
_SPACES = Path("/run/netns")
_OF_NETWORK = 0x40000000
"""CLONE_NEWNET of <linux/sched.h>."""
_NUMBERS = itertools.count(random.randrange(0x100))
"""Of the networks of this process, of which no two have the same names."""


def within(space: str) -> tuple[str, ...]:
    """Return the command by which a program is run in a network namespace."""
    return ("ip", "netns", "exec", space)


def move_into(space: str) -> None:
    """Have this process, which has one thread, be in a network namespace from now on, and what it starts.

    What it sees of /sys stays as it was, unlike `within`. OSError where that is not possible.
    """
    number = os.open(_SPACES / space, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(number, _OF_NETWORK):
            raise OSError(ctypes.get_errno(), f"cannot move into the network namespace {space}")
    finally:
        os.close(number)


class Network:
    """A bridge, with this machine at `address`, and one namespace per host that was added; all gone at the end.

    The bridge says who made it: whoever makes a network removes those whose makers were killed.

    OSError says what could not be created, for lack of rights for instance, or not be removed.
    """

    def __init__(self) -> None:
        self._mark = f"e{os.getpid() % 0xFFFF:04x}{next(_NUMBERS) % 0x100:02x}"
        self._bridge = f"{self._mark}{_BRIDGE}"
        self._hosts: dict[str, str] = {}
        self._impaired: dict[str, ImpairedCable] = {}
        self._pulled: set[str] = set()
        self._subnet = ""

    def __enter__(self) -> Self:
        for name, mark in _bridges():
            if has_ended(mark):
                _remove(name.removesuffix(_BRIDGE))
        try:
            _ip("link", "add", self._bridge, "address", _ETHERNET, "type", "bridge")
            _ip("link", "set", self._bridge, "alias", maker())
            _ip("link", "set", self._bridge, "up")
            self._subnet = self._claimed_subnet()
            _ip("address", "add", f"{self.address}/24", "dev", self._bridge, "noprefixroute")
        except BaseException:  # also where a person ends it here
            _remove(self._mark)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def address(self) -> str:
        """This machine's own address on the bridge."""
        return f"{self._subnet}.1"

    def address_of(self, host: str) -> str:
        """Return a host's address."""
        return self._hosts[host]

    def within(self, host: str) -> tuple[str, ...]:
        """Return the command by which a program is run on a host; the process becomes that program."""
        return within(self.space(host))

    def space(self, host: str) -> str:
        """Return the name of the namespace that a host is."""
        return f"{self._mark}-{host}"

    @property
    def hosts(self) -> tuple[str, ...]:
        """All that were added, in order."""
        return tuple(self._hosts)

    def add(self, host: str) -> None:
        """Add a host."""
        at = len(self._hosts) + 2
        self._hosts[host] = f"{self._subnet}.{at}"
        space, cable = self.space(host), self._cable(host)
        _ip("netns", "add", space)
        _ip("link", "add", cable, "type", "veth", "peer", "name", DEVICE, "netns", space)
        _ip("link", "set", cable, "master", self._bridge, "up")
        _ip("-n", space, "address", "add", f"{self._hosts[host]}/24", "dev", DEVICE)
        _ip("-n", space, "link", "set", DEVICE, "up")
        _ip("-n", space, "link", "set", "lo", "up")

    def occupied(self, patience: float = 2.0) -> list[str]:
        """Return the processes that still run on a host after `patience` seconds, whoever started them, as text."""

        def left() -> list[str]:
            pids = {host: _ip("netns", "pids", self.space(host), check=False).split() for host in self._hosts}
            return [f"process {pid} on the host of {host}" for host, some in pids.items() for pid in some]

        wait_until(lambda: not left(), patience)
        return left()

    def cut(self, host: str) -> None:
        """Pull the host's cable: packets either way vanish silently."""
        _ip("link", "set", self._cable(host), "nomaster")
        self._pulled.add(host)

    def mend(self, host: str) -> None:
        """Plug it in again."""
        self._pulled.discard(host)
        _ip("link", "set", self._cable(host), "master", self._bridge)

    def plugged(self, host: str) -> bool:
        """Return whether a host's cable is as it should be: neither pulled nor impaired."""
        return host not in self._pulled and host not in self._impaired

    def impair(self, host: str, impairment: Impairment) -> None:
        """Have what a host sends and gets pass late, in part or slowly until it is repaired; it has to be plugged."""
        forgotten = self.connections(host) if impairment.forgets else frozenset[Connection]()
        cable, middle, far = self._cable(host), f"{self._cable(host)}m", f"{self._cable(host)}f"
        _ip("link", "add", middle, "type", "veth", "peer", "name", far)
        _ip("link", "set", far, "master", self._bridge, "up")
        _ip("link", "set", middle, "up")
        _ip("link", "set", cable, "nomaster")
        self._impaired[host] = ImpairedCable((cable, middle), impairment, forgotten=forgotten)

    def repair(self, host: str) -> int:
        """Let it pass as before, and return how many frames were lost."""
        impaired = self._impaired.pop(host)
        impaired.close()
        _ip("link", "delete", f"{self._cable(host)}m")
        _ip("link", "set", self._cable(host), "master", self._bridge)
        return impaired.lost

    def sent(self, host: str) -> int:
        """Return the bytes that a host has sent since it was added, headers and all."""
        return int(Path(f"/sys/class/net/{self._cable(host)}/statistics/rx_bytes").read_text())

    def reset(self, host: str, other: str) -> int:
        """Reset all TCP connections between two hosts, and return how many there were; new ones can be made."""
        said = _ip("netns", "exec", self.space(host), "ss", "-K", "-H", "-t", "dst", self._hosts[other])
        return len(said.splitlines())

    def connections(self, host: str, other: str = "") -> frozenset[Connection]:
        """Return the TCP connections that a host has now, with all others or with one."""
        only = ("dst", self._hosts[other]) if other else ()
        said = _ip("netns", "exec", self.space(host), "ss", "-Hnt4", "state", "established", *only)
        return frozenset(frozenset(map(_end, line.split()[2:4])) for line in said.splitlines())

    def unlink(self, sender: str, receiver: str = "") -> None:
        """Silently lose what one host sends to another, or to this machine; all else passes."""
        self._neighbour(sender, receiver, "replace", "lladdr", "02:00:00:00:00:01", "nud", "permanent")

    def link(self, sender: str, receiver: str = "") -> None:
        """Let those packets pass again."""
        self._neighbour(sender, receiver, "delete")

    def refuse(self, dialler: str, dialled: str) -> None:
        """Route what one host sends to another back to itself, where nobody listens: all it dials there is refused.

        Packets from the other are taken for forged, and dropped.
        """
        _ip("-n", self.space(dialler), "address", "add", f"{self._hosts[dialled]}/32", "dev", "lo")

    def accept(self, dialler: str, dialled: str) -> None:
        """Let those connections arrive again."""
        _ip("-n", self.space(dialler), "address", "delete", f"{self._hosts[dialled]}/32", "dev", "lo")

    def _neighbour(self, sender: str, receiver: str, verb: str, *more: str) -> None:
        address = self._hosts[receiver] if receiver else self.address
        _ip("-n", self.space(sender), "neigh", verb, address, *more, "dev", DEVICE)

    def close(self) -> None:
        """Remove everything. Processes that run on a host keep its namespace, unnamed, until they end."""
        try:
            while self._impaired:
                self._impaired.popitem()[1].close()
            left = _remove(self._mark)
        except BaseException:  # also where a person ends it here
            _remove(self._mark)
            raise
        if left:
            raise OSError(f"of the network of this job these could not be removed: {', '.join(left)}")

    def _cable(self, host: str) -> str:
        return f"{self._mark}v{list(self._hosts).index(host)}"

    def _claimed_subnet(self) -> str:
        """Return a subnet that is this network's alone: the kernel takes one route to it, the first."""
        taken = _ip("-4", "route", "show", "table", "all")
        for _try in range(TRIES):
            subnet = f"198.{random.choice((18, 19))}.{random.randrange(256)}"
            if f"{subnet}." in taken:
                continue
            try:
                _ip("route", "add", f"{subnet}.0/24", "dev", self._bridge)
            except OSError as error:
                if "File exists" not in str(error):
                    raise
            else:
                return subnet
        raise OSError(f"no free subnet in 198.18.0.0/15 among {TRIES} tried")


def _bridges() -> list[tuple[str, str]]:
    """Return each bridge of this machine that may be a network's, with the mark of who made it."""
    bridges = []
    for path in _LINKS.glob(f"*{_BRIDGE}/ifalias"):
        # It may be removed just now.
        with contextlib.suppress(OSError):
            bridges.append((path.parent.name, path.read_text().strip()))
    return bridges


def _remove(mark: str) -> list[str]:
    """Remove the links and namespaces of which the names begin with `mark`; return those that are left, as text.

    The bridge comes last: who is killed meanwhile leaves what shows that there is more.
    """
    bridge = f"{mark}{_BRIDGE}"
    for link in _links(mark):
        # One end of a cable may be gone with the other.
        if link != bridge:
            _ip("link", "delete", link, check=False)
    for space in _spaces(mark):
        _ip("netns", "delete", space, check=False)
    _ip("link", "delete", bridge, check=False)
    return [*(f"link {name}" for name in _links(mark)), *(f"namespace {name}" for name in _spaces(mark))]


def _links(mark: str) -> list[str]:
    return [path.name for path in _LINKS.iterdir() if path.name.startswith(mark)]


def _spaces(mark: str) -> list[str]:
    # A name may be followed by a number.
    return [line.split()[0] for line in _ip("netns", "list").splitlines() if line.startswith(f"{mark}-")]


def _end(text: str) -> End:
    address, _, port = text.rpartition(":")
    return address, int(port)


def _ip(*arguments: str, check: bool = True) -> str:
    """Return what `ip` said; OSError with its complaint."""
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=30, check=False)
    if check and done.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout

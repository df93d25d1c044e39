"""By which address and which interface do other nodes reach this one?

elastic3d gives others the address that this machine has on the way to etcd (or `--local-addr`), and has gloo use the
interface which that address belongs to. NCCL chooses by itself, unless NCCL_SOCKET_IFNAME says otherwise.
"""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from elastic3d import environment
from elastic3d.doctor.findings import NodeFinding, Subject, failure, ok, warning
from elastic3d.errors import ConfigurationError
from elastic3d.rendezvous.settings import own_address

ANYWHERE = "192.0.2.1:9"
"""Of TEST-NET-1 (RFC 5737): whoever asks the routing table for it gets the default route. Nothing is sent."""

SEPARATE = ("lo", "docker")
"""Beginnings of the names that NCCL leaves out unless it is told to use them."""

_SIOCGIFADDR = 0x8915
_UP, _LOOPBACK = 0x1, 0x8


@dataclass(frozen=True, slots=True, kw_only=True)
class Interface:
    """One network interface of this machine. addresses: without link-local ones."""

    name: str
    addresses: tuple[str, ...]
    up: bool
    loopback: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkFacts:
    """address: ours on the way to `towards`, "" where there is none, `problem` says why.

    towards: etcd, or "" for the default route. host: the name of this machine; resolved: what it means here.
    gloo, nccl: as the environment has them, "" where it does not.
    """

    address: str
    problem: str
    towards: str
    interfaces: tuple[Interface, ...]
    host: str
    resolved: tuple[str, ...]
    gloo: str
    nccl: str


def judge(facts: NetworkFacts) -> tuple[NodeFinding, ...]:
    """Say by what others reach this node, and whether gloo and NCCL would use an interface that is there."""
    findings = [_address(facts), _host(facts)]
    if facts.gloo:
        findings.append(_gloo(facts))
    findings.append(_nccl(facts))
    return tuple(findings)


def interface_of(facts: NetworkFacts) -> Interface | None:
    """Return the interface that our address belongs to."""
    return next((one for one in facts.interfaces if facts.address in one.addresses), None)


def chosen_by_nccl(value: str, names: Sequence[str]) -> tuple[str, ...]:
    """Return the interfaces that NCCL_SOCKET_IFNAME allows: `^` excludes, `=` means whole names, else beginnings."""
    exclude = value.startswith("^")
    text = value.removeprefix("^")
    whole = text.startswith("=")
    wanted = [part.strip() for part in text.removeprefix("=").split(",") if part.strip()]

    def matches(name: str) -> bool:
        return any(name == part if whole else name.startswith(part) for part in wanted)

    return tuple(name for name in names if matches(name) != exclude)


def _address(facts: NetworkFacts) -> NodeFinding:
    way = f"on the way to etcd ({facts.towards})" if facts.towards else "on the default route"
    other = "give torchrun another by --local-addr"
    if not facts.address:
        return failure(
            Subject.NETWORK,
            "address",
            f"none {way}: {facts.problem}",
            f"look at name and routes of this node; or {other}",
        )
    interface = interface_of(facts)
    seen = f"{facts.address} {way}" + (f", interface {interface.name}" if interface else "")
    if ipaddress.ip_address(facts.address).is_loopback:
        return warning(
            Subject.NETWORK,
            "address",
            f"{seen}: no other node can reach it",
            f"for more than one node, name etcd by an address that others have too; or {other}",
        )
    if interface is None:
        return warning(
            Subject.NETWORK,
            "address",
            f"{seen}, of none of this machine's interfaces: gloo will choose one itself",
            "set GLOO_SOCKET_IFNAME to the interface that other nodes reach",
        )
    return ok(Subject.NETWORK, "address", seen)


def _host(facts: NetworkFacts) -> NodeFinding:
    if not facts.resolved:
        return warning(
            Subject.NETWORK,
            "host name",
            f"{facts.host} cannot be resolved here",
            "scripts that make their own process groups need it: put it into /etc/hosts, or set GLOO_SOCKET_IFNAME",
        )
    seen = f"{facts.host} is {', '.join(facts.resolved)}"
    if all(ipaddress.ip_address(one).is_loopback for one in facts.resolved) and not facts.gloo:
        return warning(
            Subject.NETWORK,
            "host name",
            f"{seen}: torchrun and gloo of other scripts would offer that to other nodes",
            "in mode=restart set GLOO_SOCKET_IFNAME and --local-addr; elastic3d.run sets both itself",
        )
    return ok(Subject.NETWORK, "host name", seen)


def _gloo(facts: NetworkFacts) -> NodeFinding:
    name = environment.GLOO_INTERFACE.name
    given = {one.name: one for one in facts.interfaces}
    ours = interface_of(facts)
    there = ", ".join(sorted(given)) or "none"
    for wanted in facts.gloo.split(","):
        interface = given.get(wanted)
        if interface is None or not interface.up or not interface.addresses:
            what = "is not there" if interface is None else "is down" if not interface.up else "has no address"
            return failure(
                Subject.NETWORK, name, f"{wanted} {what}; there are {there}", f"correct {name}, or leave it unset"
            )
        if interface.loopback:
            return warning(
                Subject.NETWORK, name, f"{wanted} is the loopback: no other node can be reached", f"unset {name}"
            )
        if ours is not None and interface.name != ours.name:
            return warning(
                Subject.NETWORK,
                name,
                f"{wanted}, but this node's address {facts.address} is {ours.name}'s",
                f"elastic3d.run will use {ours.name} all the same; --local-addr gives it an address of {wanted}",
            )
    return ok(Subject.NETWORK, name, facts.gloo)


def _nccl(facts: NetworkFacts) -> NodeFinding:
    name = environment.NCCL_INTERFACE.name
    usable = [one for one in facts.interfaces if one.up and one.addresses]
    there = ", ".join(one.name for one in usable) or "none"
    if facts.nccl:
        chosen = chosen_by_nccl(facts.nccl, [one.name for one in usable])
        if not chosen:
            return failure(
                Subject.NETWORK,
                name,
                f"{facts.nccl!r} matches no interface with an address; there are {there}",
                f"correct {name}, or leave it unset",
            )
        outward = [one.name for one in usable if one.name in chosen and not one.loopback]
        if not outward:
            return warning(
                Subject.NETWORK,
                name,
                f"{facts.nccl!r} leaves {', '.join(chosen)} only: no other node can be reached",
                f"correct {name}, or leave it unset",
            )
        return ok(Subject.NETWORK, name, f"{facts.nccl!r}: {', '.join(outward)}")
    choice = [one.name for one in usable if not one.name.startswith(SEPARATE)]
    ours = interface_of(facts)
    if len(choice) > 1 and ours is not None and ours.name in choice:
        return ok(Subject.NETWORK, name, f"not set: NCCL chooses among {', '.join(choice)}; {ours.name} is the job's")
    return ok(Subject.NETWORK, name, f"not set: NCCL chooses among {', '.join(choice) or there}")


def measure(endpoint: str) -> NetworkFacts:
    """Look at this machine's interfaces and routes. endpoint: etcd's, "" where nobody said."""
    address = problem = ""
    try:
        address = own_address(endpoint or ANYWHERE)
    except ConfigurationError as error:
        problem = str(error.__cause__ or error)
    host = socket.gethostname()
    return NetworkFacts(
        address=address,
        problem=problem,
        towards=endpoint,
        interfaces=interfaces(),
        host=host,
        resolved=_resolved(host),
        gloo=environment.GLOO_INTERFACE.read(),
        nccl=environment.NCCL_INTERFACE.read(),
    )


def interfaces() -> tuple[Interface, ...]:
    """Return all interfaces of this network namespace."""
    six = _six()
    up = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _index, name in socket.if_nameindex():
            addresses = list(six.get(name, ()))
            try:
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                addresses.insert(0, socket.inet_ntoa(answer[20:24]))
            except OSError:
                pass  # it has no IPv4 address
            flags = _flags(name)
            up.append(
                Interface(name=name, addresses=tuple(addresses), up=bool(flags & _UP), loopback=bool(flags & _LOOPBACK))
            )
    return tuple(up)


def _flags(name: str) -> int:
    try:
        return int(Path(f"/sys/class/net/{name}/flags").read_text(), 16)
    except (OSError, ValueError):
        return _UP | (_LOOPBACK if name == "lo" else 0)


def _six() -> dict[str, list[str]]:
    """Return the IPv6 addresses by interface, but for those that hold on their own link only."""
    addresses: dict[str, list[str]] = {}
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:
        return addresses
    for line in lines:
        digits, *_, name = line.split()
        address = ipaddress.IPv6Address(int(digits, 16))
        if not address.is_link_local:
            addresses.setdefault(name, []).append(str(address))
    return addresses


def _resolved(host: str) -> tuple[str, ...]:
    try:
        answers = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return ()
    return tuple(dict.fromkeys(str(answer[4][0]).partition("%")[0] for answer in answers))

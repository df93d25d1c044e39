"""Other nodes, by the port on which `elastic3d doctor --listen` waits there.

A job's nodes reach each other on ports that the system gives, in both directions. So the two doctors do not only try
the port that the person named: each opens some more for a moment, and the other connects to them.

The protocol is a line of JSON each way, at most `LINE` bytes. The one that calls says who it is and which ports it
opened; the one that listens connects back to these, says who it is, what it reached and which ports it opened, and
stays until the caller hangs up. Nothing is believed that is not checked, and nothing is connected to but the address
that called, at ports that need no privilege.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import secrets
import socket
import statistics
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from elastic3d import threads
from elastic3d.clock import SYSTEM, Clock
from elastic3d.doctor import clock as clocks
from elastic3d.doctor.clock import ClockReading
from elastic3d.doctor.findings import NodeFinding, Subject, failure, ok, warning
from elastic3d.doctor.running import CheckRun
from elastic3d.doctor.words import spell_time
from elastic3d.errors import UsageError

LINE = 4096
PORTS = 3
"""Ports of the system's own choice that each side opens, and the other tries."""

CONNECT = 3.0
"""Seconds for one connection."""

ANSWER = 8.0
"""Seconds for a peer's line: it connects back first."""

ROUNDS = 5
TURN = 0.2
"""Seconds between two looks at whether to listen on."""

AT_ONCE = 64
"""Callers that are served at the same time."""

MOST = 256
"""Peers of one call: each is called on a thread of its own."""

SLOW = 0.05
"""Seconds for a connection beyond which people are warned."""

_LISTEN = "start `elastic3d doctor --listen {port}` there, and try again"


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerAddress:
    """Where a peer listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Versions:
    """What must be the same on all nodes."""

    elastic3d: str
    torch: str

    @classmethod
    def here(cls) -> Versions:
        """Return those installed here, "" for none."""
        return cls(elastic3d=_version("elastic3d"), torch=_version("torch"))


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerFacts:
    """One peer. error: why nobody answered, "" where somebody did; refused: its host did, and nobody listens.

    connect: median seconds of a connection. doctor: whether a doctor answered; the fields after it mean nothing
    otherwise. forth, back: ports tried and ports reached, here to there and there to here. seen_as: our address as the
    peer sees it; ours: as we see it.
    """

    peer: PeerAddress
    error: str = ""
    refused: bool = False
    connect: float = 0.0
    doctor: bool = False
    host: str = ""
    versions: Versions = Versions(elastic3d="", torch="")
    forth: tuple[int, int] = (0, 0)
    back: tuple[int, int] = (0, 0)
    seen_as: str = ""
    ours: str = ""
    clock: ClockReading | None = None


def parse_peers(text: str) -> tuple[PeerAddress, ...]:
    """Return the peers of `h1:29400,[::1]:29400`; UsageError for what cannot be one."""
    addresses = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        host, colon, port = part.rpartition(":")
        bare = host.removeprefix("[").removesuffix("]")
        bracketed = host != bare
        if not colon or not bare or (":" in bare) != bracketed or not port.isdecimal() or not 0 < int(port) < 65536:
            raise UsageError(f"--peers {part!r}: give HOST:PORT,..., as in node-1:29400, of nodes that --listen there")
        addresses.append(PeerAddress(host=bare, port=int(port)))
    if not addresses:
        raise UsageError(f"--peers {text!r}: give HOST:PORT, several separated by commas")
    if len(addresses) > MOST:
        raise UsageError(f"--peers names {len(addresses)} nodes: give at most {MOST}, some of those of a larger job")
    return tuple(dict.fromkeys(addresses))


def judge(facts: PeerFacts, here: Versions) -> tuple[NodeFinding, ...]:
    """Say whether a job of this node and that one could run."""
    name = str(facts.peer)
    if facts.refused:
        return (
            failure(
                Subject.PEERS, name, "the host answers, and nobody listens there", _LISTEN.format(port=facts.peer.port)
            ),
        )
    if facts.error:
        return (
            failure(
                Subject.PEERS,
                name,
                facts.error,
                "look at the name, the route and the firewalls between; the job's nodes need all ports of each other",
            ),
        )
    seen = f"connects in {spell_time(facts.connect)}"
    if not facts.doctor:
        return (
            ok(Subject.PEERS, name, f"{seen}; no doctor listens there, so that this one port is all that was tried"),
        )
    findings = []
    for (tried, reached), way in ((facts.forth, "from here"), (facts.back, "from there to here")):
        if reached < tried:
            findings.append(
                failure(
                    Subject.PEERS,
                    name,
                    f"{tried - reached} of {tried} ports that the system gave cannot be reached {way}",
                    "open all ports between the nodes of a job, in both directions: process groups, tiles and "
                    "heartbeats use what the system gives (net.ipv4.ip_local_port_range)",
                )
            )
    for package, ours, theirs in (
        ("elastic3d", here.elastic3d, facts.versions.elastic3d),
        ("torch", here.torch, facts.versions.torch),
    ):
        if ours != theirs:
            findings.append(
                failure(
                    Subject.PEERS,
                    name,
                    f"{facts.host} has {package} {theirs or 'not installed'}, this node {ours or 'not installed'}",
                    "install the same on all nodes",
                )
            )
    if facts.seen_as != facts.ours:
        findings.append(
            warning(
                Subject.PEERS,
                name,
                f"it sees this node as {facts.seen_as}, which is {facts.ours} here: addresses are translated between",
                "nodes tell each other their own addresses: use a network without translation (hostNetwork in "
                "Kubernetes), or an overlay that all share",
            )
        )
    if findings:
        return tuple(findings)
    if facts.connect > SLOW:
        return (
            warning(
                Subject.PEERS,
                name,
                f"{facts.host}, {seen}: slow",
                "keep the nodes of one job near each other: every step waits for the slowest link",
            ),
        )
    return (ok(Subject.PEERS, name, f"{facts.host}, {seen}, all ports tried are open both ways, same versions"),)


def measure(
    peer: PeerAddress, run: CheckRun, here: Versions, id: str, *, wait: float, clock: Clock = SYSTEM
) -> PeerFacts:
    """Call a peer. wait: seconds for which one that nobody listens at yet is tried again."""
    ends = clock.monotonic() + wait
    while True:
        run.go_on(f"peer {peer}")
        facts = _call(peer, run, here, id, clock)
        if not facts.refused or clock.monotonic() >= ends:
            return facts
        run.wait(0.5)


def _call(peer: PeerAddress, run: CheckRun, here: Versions, id: str, clock: Clock) -> PeerFacts:
    try:
        times = []
        for _ in range(ROUNDS):
            run.go_on()
            start = clock.monotonic()
            socket.create_connection((peer.host, peer.port), timeout=CONNECT).close()
            times.append(clock.monotonic() - start)
        connect = statistics.median(times)
        connection = socket.create_connection((peer.host, peer.port), timeout=CONNECT)
    except ConnectionRefusedError:
        return PeerFacts(peer=peer, refused=True)
    except TimeoutError:
        return PeerFacts(peer=peer, error=f"no answer within {CONNECT:g} s")
    except (OSError, UnicodeError) as error:
        return PeerFacts(peer=peer, error=f"{getattr(error, 'strerror', None) or error}")
    with connection, _opened(connection) as ports:
        ours, theirs_at = connection.getsockname()[0], connection.getpeername()[0]
        before = clock.wall()
        answer = _exchange(connection, {"doctor": 1, "id": id, "ports": ports, **_told(here)})
        after = clock.wall()
        if answer is None:
            return PeerFacts(peer=peer, connect=connect)
        offered = _ports(answer)
        run.go_on()
        reached = _number(answer, "reached")
        return PeerFacts(
            peer=peer,
            connect=connect,
            doctor=True,
            host=_text(answer, "host"),
            versions=Versions(elastic3d=_text(answer, "elastic3d"), torch=_text(answer, "torch")),
            forth=(len(offered), _reached(theirs_at, offered)),
            back=(len(ports), min(len(ports), reached)),
            seen_as=_text(answer, "seen"),
            ours=_plain(ours),
            clock=_reading(peer, answer, before, after),
        )


def _reading(peer: PeerAddress, answer: dict[str, Any], before: float, after: float) -> ClockReading | None:
    theirs = answer.get("clock")
    if not isinstance(theirs, int | float) or isinstance(theirs, bool):
        return None
    return clocks.reading(f"peer {peer}", before=before, after=after, theirs=float(theirs), grain=0.0)


class PeerListener:
    """Answers doctors of other nodes. UsageError where the port cannot be had."""

    def __init__(self, port: int, here: Versions, clock: Clock = SYSTEM) -> None:
        self._here, self._clock = here, clock
        self._seen: dict[str, str] = {}
        self._changed = threading.Condition()
        self._slots = threading.Semaphore(AT_ONCE)
        self._closed = False
        try:
            dual = socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if dual else socket.AF_INET
            self._socket = socket.create_server(("", port), family=family, backlog=MOST, dualstack_ipv6=dual)
        except OSError as error:
            raise UsageError(f"--listen {port}: {error.strerror or error}; give another port") from error
        self.port: int = self._socket.getsockname()[1]
        self._socket.settimeout(TURN)
        self._thread = threads.start(self._serve, name="doctor-listen", edge=threads.Edge.ALONE)

    @property
    def callers(self) -> dict[str, str]:
        """The doctors that called: id and host."""
        with self._changed:
            return dict(self._seen)

    def close(self) -> None:
        """Listen no longer; callers that are being served are served to their end, a few seconds."""
        self._closed = True
        self._thread.join()
        self._socket.close()

    def _serve(self) -> None:
        while not self._closed:
            # Who comes while all are busy waits in the kernel's queue: one that is sent away takes us for no doctor.
            if not self._slots.acquire(timeout=TURN):
                continue
            try:
                connection, address = self._socket.accept()
            except TimeoutError:
                self._slots.release()
                continue
            except OSError:
                self._slots.release()
                self._clock.sleep(0.1)
                continue
            threads.start(self._answer, connection, address[0], name="doctor-peer", edge=threads.Edge.ALONE)

    def _answer(self, connection: socket.socket, address: str) -> None:
        try:
            with connection, contextlib.suppress(OSError):
                connection.settimeout(CONNECT)
                asked = _line(connection, self._clock.monotonic() + CONNECT, self._clock.monotonic)
                if asked is None or asked.get("doctor") != 1:
                    return
                with _opened(connection) as ports:
                    answer = {
                        "doctor": 1,
                        "host": socket.gethostname(),
                        "seen": _plain(address),
                        "reached": _reached(address, _ports(asked)),
                        "ports": ports,
                        "clock": self._clock.wall(),
                        **_told(self._here),
                    }
                    connection.sendall(_encoded(answer))
                    with self._changed:
                        if len(self._seen) < LINE:
                            self._seen[_text(asked, "id")] = _plain(address)
                    connection.settimeout(ANSWER)
                    connection.recv(1)  # the caller hangs up when it has tried the ports
        finally:
            self._slots.release()


@contextmanager
def _opened(connection: socket.socket) -> Iterator[list[int]]:
    """Listen on some ports that the system gives, at the address of this end of a connection."""
    with contextlib.ExitStack() as opened:
        ports = []
        for _ in range(PORTS):
            one = opened.enter_context(socket.socket(connection.family, socket.SOCK_STREAM))
            one.bind((connection.getsockname()[0], 0))
            one.listen()
            ports.append(int(one.getsockname()[1]))
        yield ports


def _reached(host: str, ports: Sequence[int]) -> int:
    """Return at how many of these ports somebody takes connections; all are tried at once."""
    reached: list[int] = []

    def connect(port: int) -> None:
        with contextlib.suppress(OSError):
            socket.create_connection((host, port), timeout=CONNECT).close()
            reached.append(port)

    tries = [threads.start(connect, port, name="doctor-port", edge=threads.Edge.ALONE) for port in ports]
    for one in tries:
        one.join()
    return len(reached)


def _exchange(connection: socket.socket, question: dict[str, Any]) -> dict[str, Any] | None:
    """Send a line and return the one that comes back; None where it is no doctor's."""
    try:
        connection.sendall(_encoded(question))
        answer = _line(connection, SYSTEM.monotonic() + ANSWER, SYSTEM.monotonic)
    except OSError:
        return None
    return answer if answer is not None and answer.get("doctor") == 1 else None


def _line(connection: socket.socket, ends: float, now: Callable[[], float]) -> dict[str, Any] | None:
    """Return the JSON object of the next line; None for anything else, or too late."""
    data = b""
    while b"\n" not in data and len(data) < LINE:
        left = ends - now()
        if left <= 0:
            return None
        connection.settimeout(left)
        part = connection.recv(LINE)
        if not part:
            return None
        data += part
    try:
        answer = json.loads(data.partition(b"\n")[0])
    except (ValueError, RecursionError):
        return None
    return answer if isinstance(answer, dict) else None


def _encoded(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields).encode() + b"\n"


def _ports(answer: dict[str, Any]) -> list[int]:
    given = answer.get("ports")
    ports = [one for one in given if isinstance(one, int) and 1024 <= one < 65536] if isinstance(given, list) else []
    return ports[:PORTS]


def _text(answer: dict[str, Any], name: str) -> str:
    """Return a short text that can be shown, whatever was sent."""
    text = answer.get(name)
    return "".join(one for one in text[:128] if one.isprintable()) if isinstance(text, str) else ""


def _number(answer: dict[str, Any], name: str) -> int:
    number = answer.get(name)
    return number if isinstance(number, int) and number >= 0 else 0


def _told(here: Versions) -> dict[str, Any]:
    return {"elastic3d": here.elastic3d, "torch": here.torch}


def _plain(address: str) -> str:
    return address.removeprefix("::ffff:").partition("%")[0]


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def new_id() -> str:
    """Return what tells one doctor's calls from another's."""
    return secrets.token_hex(8)

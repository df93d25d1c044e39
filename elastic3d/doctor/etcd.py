"""Each member of etcd as this node reaches it, and one write as a job makes them: under a lease, and removed.

Members are asked side by side, each over a client of its own, so that the one that is away is named and holds up no
other. The write goes through whichever answers, as a job's do.
"""

from __future__ import annotations

import secrets
import socket
import ssl
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime

from elastic3d.clock import SYSTEM, Clock
from elastic3d.doctor import clock as clocks
from elastic3d.doctor.clock import ClockReading
from elastic3d.doctor.findings import NodeFinding, Subject, failure, ok, warning
from elastic3d.doctor.running import CheckRun
from elastic3d.doctor.words import spell_size, spell_time
from elastic3d.errors import EtcdError, EtcdUnavailable
from elastic3d.etcd import Endpoint, EtcdClient, Impaired, LeaseGone, MemberStatus, Tls

ROUNDS = 7
"""Reads and writes whose median counts."""

TTL = 10.0
"""Seconds after which what the check wrote is gone, whatever becomes of the check."""

SLOW_READ, SLOW_WRITE = 0.1, 0.25
"""Seconds for one read and one write beyond which people are warned: a lease of a few seconds has little room left."""

FULL = 0.5
"""Part of its quota in use beyond which people are warned."""

DEFAULT_QUOTA = 2 << 30

EXPIRES = 14 * 86400.0
"""Seconds before a certificate's end in which people are warned."""

TIMEOUT, BUDGET = 2.0, 6.0
"""Seconds for one try, and for one call with all its tries."""

_SET_UP = "see docs/guides/etcd.md"
_MOST = "see that most members of the cluster run and reach each other"
_REMEDIES = {
    "wrong user name or password": "correct --user and --password-file",
    "requires a login": "give --user and --password-file, or --cert and --key",
    "does not speak TLS": "write http:// before it, and leave out --ca, --cert and --key",
    "speaks TLS": "write https:// before it, and give who signed its certificate by --ca",
}
"""By what an error says: what to do, where the error itself names settings of other programs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdPlace:
    """Where etcd is and how it lets us in. prefix: as etcd has it, "/elastic3d"; what is written lies below it."""

    endpoints: tuple[Endpoint, ...]
    prefix: str = "/elastic3d"
    user: str = ""
    password: str | None = field(default=None, repr=False)
    tls: Tls | None = None

    def client(self, endpoints: Sequence[Endpoint]) -> EtcdClient:
        """Return a client of some of the members."""
        return EtcdClient(
            [str(endpoint) for endpoint in endpoints],
            user=self.user or None,
            password=self.password,
            tls=self.tls,
            timeout=TIMEOUT,
            budget=BUDGET,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberFacts:
    """One member. error: why it did not answer or let us in, remedy: what to do; the other fields then mean nothing.

    read: median seconds of a linearizable read, 0 without a leader. certificate_ends: wall time, None without TLS.
    """

    endpoint: str
    error: str = ""
    remedy: str = ""
    status: MemberStatus | None = None
    read: float = 0.0
    certificate_ends: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteFacts:
    """The write. error: why it failed, remedy: what to do. median: seconds. removed: it was there, and then gone."""

    error: str = ""
    remedy: str = ""
    median: float = 0.0
    removed: bool = True


def judge_member(facts: MemberFacts, now: float) -> tuple[NodeFinding, ...]:
    """Say whether a member serves as it should. now: wall time."""
    if facts.error or facts.status is None:
        return (_bad(facts, facts.error, facts.remedy),)
    status = facts.status
    role = "leader" if status.leads else "learner" if status.learner else "follower"
    seen = f"version {status.version}, {role}, reads in {spell_time(facts.read)}, database {spell_size(status.size)}"
    findings = []
    if not status.has_leader:
        findings.append(
            _bad(facts, f"version {status.version}: it has no leader, and serves no reads or writes", _MOST)
        )
    elif status.learner:
        findings.append(
            _bad(facts, f"{seen}: it serves no reads or writes", "promote it (etcdctl member promote), or leave it out")
        )
    elif facts.read > SLOW_READ:
        findings.append(
            warning(
                Subject.ETCD,
                facts.endpoint,
                f"{seen}: slow",
                "put etcd nearer to the nodes, on disks of its own; leases are kept alive through it",
            )
        )
    else:
        findings.append(ok(Subject.ETCD, facts.endpoint, seen))
    return (*findings, *_alarms(facts.endpoint, status), *_space(facts.endpoint, status), *_certificate(facts, now))


def _bad(facts: MemberFacts, seen: str, remedy: str) -> NodeFinding:
    return failure(Subject.ETCD, facts.endpoint, seen, remedy)


def explained(error: EtcdError) -> tuple[str, str]:
    """Return what an error says happened, and what to do about it on this command line."""
    text = " ".join(str(error).split())
    for words, remedy in _REMEDIES.items():
        if words in text:
            return text.partition(";")[0].removeprefix("etcd: "), remedy
    # Ours have both, in this order.
    seen, _, remedy = text.partition("; ")
    return seen.removeprefix("etcd: "), remedy or _SET_UP


def _alarms(endpoint: str, status: MemberStatus) -> list[NodeFinding]:
    findings = []
    for error in status.errors:
        if "NOSPACE" in error:
            findings.append(
                failure(
                    Subject.ETCD,
                    endpoint,
                    "alarm NOSPACE: its database is full, it takes no writes",
                    "etcdctl compact, etcdctl defrag, etcdctl alarm disarm; and a larger --quota-backend-bytes",
                )
            )
        elif "CORRUPT" in error:
            findings.append(
                failure(
                    Subject.ETCD,
                    endpoint,
                    "alarm CORRUPT: a member holds other data than the rest",
                    "replace that member (etcdctl member remove, add), then etcdctl alarm disarm",
                )
            )
        elif "no leader" not in error:
            findings.append(warning(Subject.ETCD, endpoint, f"it says: {error[:200]}", "look at its log"))
    return findings


def _space(endpoint: str, status: MemberStatus) -> list[NodeFinding]:
    quota = status.quota or DEFAULT_QUOTA
    if status.size <= FULL * quota or any("NOSPACE" in error for error in status.errors):
        return []
    said = "its quota" if status.quota else "etcd's quota where nobody set one"
    size = f"{spell_size(status.size)} ({spell_size(status.in_use)} in use)"
    return [
        warning(
            Subject.ETCD,
            endpoint,
            f"its database has {size} of {spell_size(quota)}, {said}",
            "beyond it no generation can change: set --auto-compaction-retention, and etcdctl defrag",
        )
    ]


def _certificate(facts: MemberFacts, now: float) -> list[NodeFinding]:
    if facts.certificate_ends is None:
        return []
    left = facts.certificate_ends - now
    if left > EXPIRES:
        return [ok(Subject.ETCD, facts.endpoint, f"TLS, its certificate is good for {left / 86400:.0f} days more")]
    return [
        warning(
            Subject.ETCD,
            facts.endpoint,
            f"TLS, its certificate ends in {max(0.0, left / 3600):.0f} h",
            "renew it; running jobs read new files by themselves",
        )
    ]


def judge_cluster(members: Sequence[MemberFacts]) -> tuple[NodeFinding, ...]:
    """Say whether the members that answer are those of one cluster, each once."""
    there = [(one.endpoint, one.status) for one in members if one.status is not None and not one.error]
    if len({status.cluster for _, status in there}) > 1:
        by = Counter(f"{status.cluster:x}" for _, status in there)
        return (
            failure(
                Subject.ETCD,
                "cluster",
                f"the endpoints are of {len(by)} clusters: "
                + ", ".join(f"{endpoint} of {status.cluster:x}" for endpoint, status in there),
                "name the members of one cluster only: nodes would not find each other",
            ),
        )
    twice = [member for member, count in Counter(status.member for _, status in there).items() if count > 1]
    if twice:
        same = ", ".join(endpoint for endpoint, status in there if status.member in twice)
        return (
            warning(
                Subject.ETCD,
                "cluster",
                f"{same} are one member",
                "name each member by one address: one that is down looks like two",
            ),
        )
    if 0 < len(there) < len(members):
        return (
            warning(
                Subject.ETCD,
                "cluster",
                f"{len(there)} of {len(members)} endpoints answer",
                "a job goes on with those that do, with less in reserve; mend or leave out the others",
            ),
        )
    return ()


def judge_write(facts: WriteFacts, prefix: str) -> NodeFinding:
    """Say whether this node can write as a job does."""
    name = f"write under {prefix}"
    if facts.error:
        return failure(Subject.ETCD, name, facts.error, facts.remedy)
    seen = f"a key under a lease, in {spell_time(facts.median)}"
    if not facts.removed:
        return failure(
            Subject.ETCD,
            name,
            f"{seen}; it was still there when its lease was revoked",
            "this server does not keep what etcd promises; use etcd 3.4 or later itself",
        )
    if facts.median > SLOW_WRITE:
        return warning(
            Subject.ETCD,
            name,
            f"{seen}: slow",
            "etcd waits for its disk: give it an SSD that nothing else uses (etcd_disk_wal_fsync_duration_seconds)",
        )
    return ok(Subject.ETCD, name, f"{seen}, gone with it")


def measure_member(place: EtcdPlace, endpoint: Endpoint, run: CheckRun, clock: Clock = SYSTEM) -> MemberFacts:
    """Ask one member who it is, and whether we may read what a job reads; time some reads."""
    name = str(endpoint)
    run.go_on(f"{name}: version")
    with place.client([endpoint]) as client:
        try:
            client.check(f"{place.prefix}/")
            status = client.member_status()
            times = []
            for _ in range(ROUNDS):
                run.go_on(f"{name}: reads")
                times.append(_timed(clock, lambda: client.exists(f"{place.prefix}/")))
        except EtcdError as error:
            seen, remedy = explained(error)
            if isinstance(error, EtcdUnavailable) and not isinstance(error, Impaired):
                # Who has no leader answers no read, and says who it is all the same.
                alone = _status(client)
                if alone is not None and not alone.has_leader:
                    return MemberFacts(endpoint=name, status=alone)
                if alone is not None:
                    seen, remedy = f"version {alone.version}, and no read came back within {BUDGET:g} s", _MOST
                else:
                    seen = _unanswered(endpoint)
                    remedy = "see that etcd runs there, the name, the route and the firewalls"
            return MemberFacts(endpoint=name, error=seen.removeprefix(f"{name} "), remedy=remedy)
    run.go_on(f"{name}: certificate")
    return MemberFacts(
        endpoint=name,
        status=status,
        read=statistics.median(times),
        certificate_ends=_certificate_ends(endpoint, place.tls) if endpoint.tls else None,
    )


def measure_write(place: EtcdPlace, run: CheckRun, clock: Clock = SYSTEM) -> WriteFacts:
    """Write a key under a lease some times, and remove both."""
    run.go_on("a write")
    key = f"{place.prefix}/doctor-{secrets.token_hex(8)}"
    with place.client(place.endpoints) as client:
        try:
            what = f"key {key} in etcd, which its lease removes within {TTL:g} s,"
            lease, _ = client.grant(TTL)
            run.making(what)
            try:
                times = []
                for _ in range(ROUNDS):
                    run.go_on()
                    times.append(_timed(clock, lambda: client.put(key, b"doctor", lease, idempotent=True)))
                there = client.get(key) is not None
            finally:
                try:
                    client.revoke(lease)
                finally:
                    run.removed(what)  # by its lease, where not by us
            gone = client.get(key) is None
        except LeaseGone:
            slow = f"the lease of {TTL:g} s was over before {ROUNDS} writes were"
            return WriteFacts(error=slow, remedy="etcd is far too slow for a job: look at its disks and its load")
        except EtcdError as error:
            seen, remedy = explained(error)
            return WriteFacts(error=seen, remedy=remedy)
        return WriteFacts(median=statistics.median(times), removed=there and gone)


def measure_clock(place: EtcdPlace, endpoint: Endpoint, clock: Clock = SYSTEM) -> ClockReading | None:
    """Return how a member's clock stands to ours, by the Date of its answer; None where it gives none."""
    before = clock.wall()
    answer = _ask(endpoint, place.tls)
    after = clock.wall()
    for line in answer.split("\r\n"):
        name, _, value = line.partition(":")
        if name.lower() == "date":
            try:
                theirs = parsedate_to_datetime(value.strip()).timestamp()
            except ValueError:
                return None
            return clocks.reading(f"etcd {endpoint.target}", before=before, after=after, theirs=theirs, grain=1.0)
    return None


def _status(client: EtcdClient) -> MemberStatus | None:
    try:
        return client.member_status()
    except EtcdError:
        return None


def _unanswered(endpoint: Endpoint) -> str:
    """Return in words why nobody who speaks etcd's protocol answered there."""
    try:
        socket.create_connection((endpoint.host, endpoint.port), TIMEOUT).close()
    except ConnectionRefusedError:
        return "the host answers, and nobody listens there"
    except TimeoutError:
        return f"no answer within {TIMEOUT:g} s"
    except (OSError, UnicodeError) as error:
        return f"cannot be reached: {getattr(error, 'strerror', None) or error}"
    return "takes connections, and answers nothing that etcd would"


def _timed(clock: Clock, call: Callable[[], object]) -> float:
    start = clock.monotonic()
    call()
    return clock.monotonic() - start


def _ask(endpoint: Endpoint, tls: Tls | None) -> str:
    """Return the head of etcd's answer to `GET /version`, "" for none."""
    question = f"GET /version HTTP/1.0\r\nHost: {endpoint.target}\r\n\r\n".encode()
    try:
        with socket.create_connection((endpoint.host, endpoint.port), TIMEOUT) as connection:
            if not endpoint.tls:
                connection.sendall(question)
                return connection.recv(1 << 14).decode("latin-1")
            with _context(tls).wrap_socket(connection, server_hostname=_name(endpoint, tls)) as encrypted:
                encrypted.sendall(question)
                return encrypted.recv(1 << 14).decode("latin-1")
    except (OSError, ValueError):
        return ""


def _certificate_ends(endpoint: Endpoint, tls: Tls | None) -> float | None:
    try:
        with socket.create_connection((endpoint.host, endpoint.port), TIMEOUT) as connection:
            with _context(tls).wrap_socket(connection, server_hostname=_name(endpoint, tls)) as encrypted:
                shown = encrypted.getpeercert() or {}
                return float(ssl.cert_time_to_seconds(str(shown["notAfter"])))
    except (OSError, ValueError, KeyError):
        return None  # whether it can be used at all has been told by the member's own line


def _context(tls: Tls | None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=tls.ca if tls is not None else None)
    if tls is not None and tls.certificate is not None and tls.key is not None:
        context.load_cert_chain(tls.certificate, tls.key)
    return context


def _name(endpoint: Endpoint, tls: Tls | None) -> str:
    return (tls.server_name if tls is not None else None) or endpoint.host

"""What needs no server: endpoints, the breaker, the bytes of messages, and the meaning of failures."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic3d.errors import ConfigurationError, EtcdRefused, EtcdUnavailable, UsageError
from elastic3d.etcd import (
    Compare,
    Delete,
    EtcdClient,
    Get,
    LeaseGone,
    OutcomeUnknown,
    Put,
    Tls,
    failures,
    messages,
    parse_endpoints,
    password_warning,
)
from elastic3d.etcd.breaker import ELECTION, FIRST_REST, LONGEST_REST, Breaker
from elastic3d.etcd.codec import Codec
from elastic3d.etcd.diagnosis import require_version
from elastic3d.etcd.failures import FailureKind
from elastic3d.etcd.transport import AUTHENTICATE, Method, RpcFailure
from tests.clocks import HandClock


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("h1:2379,h2:2380", ["http://h1:2379", "http://h2:2380"]),
        ("etcd", ["http://etcd:2379"]),
        ("https://e1, http://e2:1/", ["https://e1:2379", "http://e2:1"]),
        ("[::1]:2379,10.0.0.1:5", ["http://[::1]:2379", "http://10.0.0.1:5"]),
        ("h:1,h:1", ["http://h:1"]),
    ],
)
def test_endpoints_are_parsed_as_people_write_them(text: str, expected: list[str]) -> None:
    """Schemes, default ports, several hosts, IPv6 in brackets; duplicates count once."""
    assert list(map(str, parse_endpoints(text))) == expected
    assert list(map(str, parse_endpoints(text.split(",")))) == expected


@pytest.mark.parametrize("text", ["", " , ", "tcp://h:1", "h:port", "h:99999", "http://", "h:1/path", "::1", "u@h:1"])
def test_a_malformed_endpoint_is_refused_and_quoted(text: str) -> None:
    """The error is a ConfigurationError, which the user can correct."""
    with pytest.raises(ConfigurationError, match="etcd: "):
        parse_endpoints(text)


def test_tls_files_imply_encryption_and_contradict_http(tmp_path: Path) -> None:
    """Without a scheme TLS files decide; `http://` beside them is a contradiction, and so is half a certificate."""
    assert str(parse_endpoints("h", tls=True)[0]) == "https://h:2379"
    with pytest.raises(ConfigurationError, match="https://"):
        parse_endpoints("http://h", tls=True)
    with pytest.raises(ConfigurationError, match="go together"):
        Tls(certificate=tmp_path)
    with pytest.raises(ConfigurationError, match="no file"):
        Tls(ca=tmp_path / "absent.pem")


def test_a_user_without_a_password_is_refused() -> None:
    """Half of the credentials is a mistake."""
    with pytest.raises(ConfigurationError, match="go together"):
        EtcdClient("h", user="root")


def test_tries_get_longer_where_there_is_no_other_member() -> None:
    """They double each time one passed in vain, however many waited; a prompt answer makes them short again."""
    clock = HandClock()
    late = RpcFailure("DEADLINE_EXCEEDED", "")
    session = EtcdClient("a:1,b:1", clock=clock).session
    session.failed(0, late)
    assert session.patience == 1.0, "the other one may be healthy"
    session.failed(1, late)
    session.failed(0, late)
    assert session.patience == 2.0
    for _ in range(5):
        clock.now += session.patience
        session.failed(0, late)
        session.failed(1, RpcFailure("UNAVAILABLE", ""))
    assert session.patience == 8.0
    session.heard(1, asked=clock.now - 3.0)
    session.heard(1)
    assert session.patience == 8.0, "an answer after 3 s says that it is slow"
    for _ in range(3):
        session.heard(1, asked=clock.now - 0.1)
    assert session.patience == 1.0


class _Busy:
    """Stands for a connection to a member that is still busy with the password when the time is over."""

    def __init__(self, clock: HandClock) -> None:
        self.limits: list[float] = []
        self._clock = clock

    def call(self, method: Method, request: object, *, timeout: float) -> None:
        """Let the time pass."""
        assert method is AUTHENTICATE
        self.limits.append(timeout)
        self._clock.now += timeout
        raise RpcFailure("DEADLINE_EXCEEDED", "Deadline Exceeded")


def test_logins_get_longer_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where many log in at once a password takes its time; the write that needed the token was surely not sent."""
    clock = HandClock()
    client = EtcdClient("h:1", user="me", password="r", clock=clock)
    member = _Busy(clock)
    monkeypatch.setattr(client.session, "_channel", lambda index: member)
    with pytest.raises(EtcdUnavailable) as caught:
        client.put("k", b"", budget=7.0)
    assert not isinstance(caught.value, OutcomeUnknown)
    assert member.limits == [1.0, 2.0, 4.0]


def test_the_breaker_stays_with_a_working_member() -> None:
    """No round robin: the preferred member is first until it fails, then the one that answered stays first."""
    breaker = Breaker(3, preferred=1)
    assert breaker.order(0.0) == [1, 2, 0]
    breaker.failed(1, 0.0)
    assert breaker.order(0.0) == [2, 0, 1]
    breaker.succeeded(2)
    assert breaker.order(100.0) == [2, 0, 1], "a rested member is not tried while others work"
    breaker.succeeded(1)
    assert breaker.order(100.0) == [2, 0, 1]


def test_the_breaker_tries_the_longest_rested_first_if_all_failed() -> None:
    """It orders and never refuses: otherwise nobody would notice that etcd is back."""
    breaker = Breaker(2)
    breaker.failed(0, 0.0)
    breaker.failed(1, 0.1)
    assert breaker.order(0.2) == [0, 1]
    breaker.failed(0, FIRST_REST)  # tried again, failed again: rests twice as long
    assert breaker.order(FIRST_REST + 0.2) == [1, 0]


def test_the_breaker_prefers_an_electing_member_to_a_silent_one() -> None:
    """However long they rested, but only for the time of an election: it may be cut off from all others."""
    breaker = Breaker(2, preferred=0)
    breaker.failed(0, 0.0)
    for at in (0.1, 0.6, ELECTION):
        breaker.failed(1, at, electing=True)
        assert breaker.order(at)[0] == 1
    assert breaker.order(0.1 + ELECTION)[0] == 0
    breaker.succeeded(1)
    assert breaker.order(4.0)[0] == 1


def test_the_breaker_counts_an_outage_once_for_all_threads() -> None:
    """Ten calls that fail in one outage rest the member like one call."""
    breaker = Breaker(2)
    for _ in range(10):
        breaker.failed(0, 0.0)
    breaker.failed(1, 0.0)
    breaker.failed(1, FIRST_REST)
    assert breaker.order(FIRST_REST)[0] == 0


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans(), st.floats(0, 30)), max_size=40))
def test_the_breaker_always_orders_all_members(events: list[tuple[int, bool, float]]) -> None:
    """Every member is in the order once, working ones first, and none rests for ever."""
    breaker, now, working = Breaker(4), 0.0, set(range(4))
    for index, success, passed in events:
        now += passed
        if success:
            breaker.succeeded(index)
            working.add(index)
        else:
            breaker.failed(index, now)
            working.discard(index)
    order = breaker.order(now)
    assert sorted(order) == [0, 1, 2, 3]
    assert set(order[: len(working)]) == working
    assert sorted(breaker.order(now + LONGEST_REST)) == [0, 1, 2, 3]


def test_messages_are_encoded_as_by_etcd() -> None:
    """Field numbers and types are those of etcd's rpc.proto, written out by hand here."""
    put = messages.new("PutRequest", key=b"k", value=b"v", lease=300)
    assert put.SerializeToString() == b"\x0a\x01k\x12\x01v\x18\xac\x02"
    span = messages.new("RangeRequest", key=b"a", range_end=b"b", revision=7, keys_only=True)
    assert span.SerializeToString() == b"\x0a\x01a\x12\x01b\x20\x07\x40\x01"
    watch = messages.new("WatchRequest", progress_request=messages.new("WatchProgressRequest"))
    assert watch.SerializeToString() == b"\x1a\x00"
    event = messages.new("Event", type=1, kv=messages.new("KeyValue", key=b"k", mod_revision=3))
    answer = messages.new("WatchResponse", events=[event])
    assert answer.SerializeToString() == b"\x5a\x09\x08\x01\x12\x05\x0a\x01k\x18\x03"
    grant = messages.new("LeaseGrantRequest", TTL=3, ID=5)
    assert grant.SerializeToString() == b"\x08\x03\x10\x05"


def test_a_condition_on_zero_is_sent() -> None:
    """`create_revision == 0` (the key is absent) has its zero on the wire: the field is in a oneof."""
    codec = Codec("/n/")
    absent = codec.compare(Compare.absent("k"))
    assert absent.SerializeToString() == b"\x10\x01\x1a\x04/n/k\x28\x00"
    value = codec.compare(Compare.value("k", b"x"))
    assert value.SerializeToString() == b"\x10\x03\x1a\x04/n/k\x3a\x01x"


def test_operations_carry_the_namespace() -> None:
    """Every key is sent under the namespace, prefixes with their end; foreign bytes in keys survive the way back."""
    codec = Codec("/n/")
    assert codec.operation(Put("k", b"v", 1)).request_put.key == b"/n/k"
    assert codec.operation(Delete("k", prefix=True)).request_delete_range.range_end == b"/n/l"
    assert codec.operation(Get("", prefix=True)).request_range.range_end == b"/n0"
    item = codec.key_value(messages.new("KeyValue", key=b"/n/\xff"))
    assert codec.key(item.key) == b"/n/\xff"


@given(st.binary(max_size=4), st.binary(max_size=6))
def test_the_end_of_a_prefix_bounds_exactly_that_prefix(prefix: bytes, key: bytes) -> None:
    """A key is in [prefix, end) if and only if it begins with the prefix; end `\\0` stands for no bound."""
    end = messages.prefix_end(prefix)
    inside = key >= prefix and (end == b"\0" or key < end)
    assert inside == key.startswith(prefix)


def test_messages_do_not_clash_with_another_etcdserverpb() -> None:
    """Another package may register `etcdserverpb` in protobuf's own pool before or after us."""
    program = """
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
def theirs(name):
    file = descriptor_pb2.FileDescriptorProto(name=name, package="etcdserverpb." + name[0], syntax="proto3")
    message = file.message_type.add(name="PutRequest")
    message.field.add(name="other", number=1, type=3, label=1)
    descriptor_pool.Default().AddSerializedFile(file.SerializeToString())
theirs("rpc.proto")
file = descriptor_pb2.FileDescriptorProto(name="elastic3d/etcd.proto", package="etcdserverpb", syntax="proto3")
file.message_type.add(name="PutRequest").field.add(name="key", number=9, type=3, label=1)
descriptor_pool.Default().AddSerializedFile(file.SerializeToString())
from elastic3d.etcd import messages
theirs("kv.proto")
assert messages.new("PutRequest", key=b"k").SerializeToString() == b"\\n\\x01k"
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


@pytest.mark.parametrize(
    ("code", "detail", "expected"),
    [
        ("UNAVAILABLE", "failed to connect to all addresses; last error: refused", FailureKind.NOT_APPLIED),
        ("UNAVAILABLE", "etcdserver: no leader", FailureKind.NOT_APPLIED),
        ("UNAVAILABLE", "etcdserver: request timed out", FailureKind.UNKNOWN),
        ("UNAVAILABLE", "Socket closed", FailureKind.UNKNOWN),
        ("DEADLINE_EXCEEDED", "", FailureKind.UNKNOWN),
        ("UNAUTHENTICATED", "etcdserver: invalid auth token", FailureKind.TOKEN),
        ("UNKNOWN", "auth: revision in header is old", FailureKind.TOKEN),
        ("INVALID_ARGUMENT", "etcdserver: user name is empty", FailureKind.TOKEN),
        ("UNAVAILABLE", "rpc error: code = InvalidArgument desc = etcdserver: user name is empty", FailureKind.TOKEN),
        ("RESOURCE_EXHAUSTED", "etcdserver: mvcc: database space exceeded", FailureKind.LATER),
        ("NOT_FOUND", "etcdserver: requested lease not found", FailureKind.FINAL),
        ("INVALID_ARGUMENT", "etcdserver: too many operations in txn request", FailureKind.FINAL),
    ],
)
def test_a_failure_says_whether_the_request_may_have_been_applied(
    code: str, detail: str, expected: FailureKind
) -> None:
    """Only what etcd refuses before proposing counts as not applied."""
    assert failures.kind(RpcFailure(code, detail)) is expected


def test_only_who_has_a_password_logs_in_again() -> None:
    """Where etcd asks for a login that was not needed before; whoever has none is refused, or waits for it."""
    nameless = RpcFailure("INVALID_ARGUMENT", "etcdserver: user name is empty")
    known = EtcdClient("h:1", user="me", password="r").session
    stranger = EtcdClient("h:1").session
    assert (known.kind(nameless), stranger.kind(nameless)) == (FailureKind.TOKEN, FailureKind.FINAL)
    known._let_in = stranger._let_in = True
    assert (known.kind(nameless), stranger.kind(nameless)) == (FailureKind.TOKEN, FailureKind.LATER)


def test_final_failures_say_what_to_do() -> None:
    """A dead lease is an error of its own; those of permission and space name the remedy."""
    assert isinstance(failures.final(RpcFailure("NOT_FOUND", "etcdserver: requested lease not found")), LeaseGone)
    denied = failures.final(RpcFailure("PERMISSION_DENIED", "etcdserver: permission denied"))
    assert isinstance(denied, EtcdRefused)
    assert "readwrite" in str(denied)


@pytest.mark.parametrize("version", ["2.3.7", "3.3.25", "", "not a version"])
def test_older_servers_are_refused(version: str) -> None:
    """We need what etcd has had since 3.4."""
    with pytest.raises(EtcdRefused, match=r"3\.4"):
        require_version(version, (3, 4))
    require_version("3.10.0", (3, 4))


def test_a_closed_client_is_refused() -> None:
    """Using a client after close is the caller's mistake."""
    client = EtcdClient("127.0.0.1:1")
    client.close()
    client.close()
    with pytest.raises(UsageError, match="closed"):
        client.get("k")


@pytest.mark.parametrize(
    ("endpoints", "named"),
    [
        ("127.0.0.1:2379,localhost:2379,[::1]:2379", ()),
        ("https://etcd.example:2379", ()),
        ("127.0.0.1:2379,etcd.example,10.0.0.7:2379", ("http://etcd.example:2379", "http://10.0.0.7:2379")),
    ],
)
def test_an_exposed_password_is_reported(endpoints: str, named: tuple[str, ...]) -> None:
    """It is if it goes unencrypted to another host, and is not if it stays on this one or is encrypted."""
    said = password_warning("me", parse_endpoints(endpoints))
    assert bool(said) == bool(named)
    assert all(endpoint in said for endpoint in named)
    assert "127.0.0.1" not in said

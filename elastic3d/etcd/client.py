"""The client: keys, transactions and leases of an etcd v3 cluster, in calls that block.

Requests that are safe to send again are sent again, to another member if need be, within a budget. A write that got no
answer is surfaced as OutcomeUnknown, since etcd may have applied it: the caller reads it back, or says
`idempotent=True` if applying it twice is the same as once. Everything is thread-safe and belongs to the process that
made it.
"""

from __future__ import annotations

import contextlib
import math
import secrets
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self

from elastic3d.clock import SYSTEM, Clock
from elastic3d.errors import EtcdRefused, EtcdUnavailable
from elastic3d.etcd import diagnosis, failures, messages, transport
from elastic3d.etcd.codec import Codec
from elastic3d.etcd.endpoints import parse_endpoints
from elastic3d.etcd.failures import Compacted, FailureKind, LeaseGone
from elastic3d.etcd.operations import Compare, Get, KeyValue, ListedMember, MemberStatus, Operation, TxnResult
from elastic3d.etcd.session import Session
from elastic3d.etcd.tls import Tls
from elastic3d.etcd.transport import RpcFailure

OLDEST = (3, 4)


class EtcdClient:
    """Talk to the cluster behind `endpoints`.

    endpoints: "h1:2379,h2:2379", with or without http(s)://, or a sequence of such. user, password: if etcd asks for
    them; a function is called for the password each time etcd asks. tls: files, see Tls; they are read for each
    connection. timeout: seconds for one try at one member. budget: seconds for a call with all its tries, by default;
    each call can have its own. namespace: put before every key and taken off again.

    Makes no connection until first used. Every method raises EtcdUnavailable (trying again may help), EtcdRefused (it
    does not), UsageError after close. A forked child may go on using it.
    """

    def __init__(
        self,
        endpoints: str | Sequence[str],
        *,
        user: str | None = None,
        password: str | Callable[[], str] | None = None,
        tls: Tls | None = None,
        namespace: str = "",
        timeout: float = 1.0,
        budget: float = 5.0,
        clock: Clock = SYSTEM,
    ) -> None:
        self.codec = Codec(namespace)
        self.session = Session(
            parse_endpoints(endpoints, tls=tls is not None),
            user=user,
            password=password,
            tls=tls,
            timeout=timeout,
            budget=budget,
            clock=clock,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End all watches, lease keepers, streams and connections. May be called twice. Leases are left to run out."""
        self.session.close()

    def check(self, prefix: str = "", *, budget: float | None = None) -> str:
        """Return the server's version, such as "3.5.1", after proving that we may read `prefix`.

        EtcdRefused names what is wrong: not etcd, older than 3.4, TLS on one side only, wrong credentials, no
        permission. A user with rights on only a part of the namespace has to give that prefix.
        """
        try:
            status = self.session.call(transport.STATUS, messages.new("StatusRequest"), safe=True, budget=budget)
        except (EtcdUnavailable, EtcdRefused) as error:
            diagnosis.explain(self.session.endpoints, self.session.timeout, error)
            raise
        version = str(status.version)
        diagnosis.require_version(version, OLDEST)
        self.exists(prefix, budget=budget)
        return version

    def get(self, key: str, *, budget: float | None = None) -> KeyValue | None:
        """Return `key` as the cluster has it now (a linearizable read); None if it is not there."""
        request = messages.new("RangeRequest", key=self.codec.key(key))
        answer = self.session.call(transport.RANGE, request, safe=True, budget=budget)
        return self.codec.key_value(answer.kvs[0]) if answer.kvs else None

    def range(self, prefix: str, revision: int = 0, *, budget: float | None = None) -> tuple[tuple[KeyValue, ...], int]:
        """Return all keys that begin with `prefix`, in key order, and the store's revision at which they were read.

        revision: read as of then instead of now; Compacted if etcd has discarded it.
        """
        request = messages.new("RangeRequest", revision=revision, **self.codec.span(prefix, prefix=True))
        answer = self.session.call(transport.RANGE, request, safe=True, budget=budget)
        return tuple(map(self.codec.key_value, answer.kvs)), revision or int(answer.header.revision)

    def next_key(self, start: str, end: str, *, budget: float | None = None) -> str | None:
        """Return the first key from `start` on and before `end`, None if there is none; no value is sent."""
        span = {"key": self.codec.key(start), "range_end": self.codec.key(end)}
        request = messages.new("RangeRequest", limit=1, keys_only=True, **span)
        answer = self.session.call(transport.RANGE, request, safe=True, budget=budget)
        return self.codec.key_value(answer.kvs[0]).key if answer.kvs else None

    def exists(self, prefix: str, *, budget: float | None = None) -> bool:
        """Return whether there is any key that begins with `prefix`."""
        request = messages.new("RangeRequest", limit=1, keys_only=True, **self.codec.span(prefix, prefix=True))
        return bool(self.session.call(transport.RANGE, request, safe=True, budget=budget).kvs)

    def put(
        self, key: str, value: bytes, lease: int = 0, *, idempotent: bool = False, budget: float | None = None
    ) -> int:
        """Write `value` under `key` and return its revision. LeaseGone if the lease is over.

        idempotent: nobody else writes this key, so that a write without an answer may be sent again.
        """
        request = messages.new("PutRequest", key=self.codec.key(key), value=value, lease=lease)
        answer = self.session.call(transport.PUT, request, safe=idempotent, budget=budget)
        return int(answer.header.revision)

    def delete(self, key: str, *, prefix: bool = False, idempotent: bool = False, budget: float | None = None) -> int:
        """Delete `key`, or with `prefix` all that begins with it; return how many there were."""
        request = messages.new("DeleteRangeRequest", **self.codec.span(key, prefix=prefix))
        answer = self.session.call(transport.DELETE_RANGE, request, safe=idempotent, budget=budget)
        return int(answer.deleted)

    def txn(
        self,
        compares: Sequence[Compare],
        success: Sequence[Operation],
        failure: Sequence[Operation] = (),
        *,
        idempotent: bool = False,
        budget: float | None = None,
    ) -> TxnResult:
        """Run `success` if every condition holds, else `failure`, in one revision. At most 128 operations.

        idempotent: it may be sent again when no answer came. The second sending of a compare-and-swap finds the first
        one's result and reports `succeeded=False`: have `failure` get the key and look for your own write.
        """
        request = messages.new(
            "TxnRequest",
            compare=[self.codec.compare(compare) for compare in compares],
            success=[self.codec.operation(operation) for operation in success],
            failure=[self.codec.operation(operation) for operation in failure],
        )
        reads_only = all(isinstance(operation, Get) for operation in (*success, *failure))
        answer = self.session.call(transport.TXN, request, safe=idempotent or reads_only, budget=budget)
        gets = tuple(
            tuple(map(self.codec.key_value, response.response_range.kvs))
            for response in answer.responses
            if response.HasField("response_range")
        )
        return TxnResult(succeeded=bool(answer.succeeded), revision=int(answer.header.revision), gets=gets)

    def database_size(self, *, budget: float | None = None) -> int:
        """Return the bytes allocated by the database of the member that answers."""
        return int(self.session.call(transport.STATUS, messages.new("StatusRequest"), safe=True, budget=budget).dbSize)

    def member_status(self, *, budget: float | None = None) -> MemberStatus:
        """Return what the member which answers says of itself; nobody is asked for a password for it."""
        answer = self.session.call(transport.STATUS, messages.new("StatusRequest"), safe=True, budget=budget)
        return MemberStatus(
            cluster=int(answer.header.cluster_id),
            member=int(answer.header.member_id),
            version=str(answer.version),
            leads=answer.leader != 0 and answer.leader == answer.header.member_id,
            has_leader=answer.leader != 0,
            learner=bool(answer.isLearner),
            size=int(answer.dbSize),
            in_use=int(answer.dbSizeInUse),
            quota=int(answer.dbSizeQuota),
            errors=tuple(map(str, answer.errors)),
        )

    def members(self, *, budget: float | None = None) -> tuple[ListedMember, ...]:
        """Return the members of the cluster, as the one which answers knows them; EtcdRefused if only root may ask."""
        answer = self.session.call(transport.MEMBER_LIST, messages.new("MemberListRequest"), safe=True, budget=budget)
        return tuple(
            ListedMember(
                member=int(one.ID),
                name=str(one.name),
                addresses=tuple(map(str, one.clientURLs)),
                learner=bool(one.isLearner),
            )
            for one in answer.members
        )

    def snapshot(self, *, limit: float = 600.0) -> Iterator[bytes]:
        """Yield, piece by piece, the whole database of one member as it is now, and at its end the SHA-256 of all that.

        limit: seconds for all of it. EtcdUnavailable where it broke off: what was yielded is not whole.
        """
        failure: RpcFailure | None = None
        for index in self.session.order():
            begun = False
            try:
                stream = self.session.open(transport.SNAPSHOT, [messages.new("SnapshotRequest")], index, limit=limit)
                try:
                    for answer in stream:
                        begun = True
                        yield bytes(answer.blob)
                    return
                finally:
                    self.session.end(stream)
            except RpcFailure as error:
                failure = error
                if failure.code == "PERMISSION_DENIED":
                    raise EtcdRefused("etcd: only the user root may take a snapshot; log in as that") from error
                if self.session.kind(failure) is FailureKind.FINAL:
                    raise failures.final(failure) from error
                self.session.failed(index, failure)
                if begun:
                    break
        assert failure is not None
        raise EtcdUnavailable(
            f"etcd: no member gave its whole snapshot ({failure}); trying again may help"
        ) from failure

    def compact(self, revision: int) -> None:
        """Have etcd discard the states of all keys, others' too, before `revision`; current values stay.

        Nothing happens where that is done already: by somebody else, or by a request whose answer was lost.
        """
        with contextlib.suppress(Compacted):
            self.session.call(transport.COMPACT, messages.new("CompactionRequest", revision=revision), safe=True)

    def grant(self, ttl: float, *, budget: float | None = None) -> tuple[int, float]:
        """Return the id of a new lease and its time to live in seconds, which etcd may have raised (least about 2 s).

        Counts from some moment during this call. See LeaseKeeper for one that is kept alive.
        """
        # Our own id makes it safe to send again: the second sending finds the lease there.
        lease = secrets.randbits(62) + 1
        seconds = max(1, math.ceil(ttl))
        request = messages.new("LeaseGrantRequest", TTL=seconds, ID=lease)
        try:
            answer = self.session.call(transport.LEASE_GRANT, request, safe=True, budget=budget)
        except EtcdRefused as error:
            if "lease already exists" not in str(error):
                raise
            return lease, float(seconds)
        return lease, float(answer.TTL)

    def revoke(self, lease: int, *, budget: float | None = None) -> None:
        """End a lease and delete its keys; nothing happens if it is over already."""
        try:
            self.session.call(
                transport.LEASE_REVOKE, messages.new("LeaseRevokeRequest", ID=lease), safe=True, budget=budget
            )
        except LeaseGone:
            pass

    def time_to_live(self, lease: int, *, budget: float | None = None) -> float | None:
        """Return the whole seconds a lease has left; None if it is over."""
        answer = self._lease(lease, budget)
        return None if answer is None else float(answer.TTL)

    def granted(self, lease: int, *, budget: float | None = None) -> float | None:
        """Return the whole seconds that a lease has whenever it is kept alive; None if it is over."""
        answer = self._lease(lease, budget)
        return None if answer is None else float(answer.grantedTTL)

    def term(self, prefix: str, *, budget: float | None = None) -> int:
        """Return the term of the cluster's leader, after a linearizable read of `prefix`, for which we need the rights.

        Within a term what a lease has left shrinks evenly; a new leader begins it anew (etcd's lessor, `Promote`).
        """
        request = messages.new("RangeRequest", limit=1, keys_only=True, **self.codec.span(prefix, prefix=True))
        return int(self.session.call(transport.RANGE, request, safe=True, budget=budget).header.raft_term)

    def leases(self, *, budget: float | None = None) -> tuple[int, ...]:
        """Return the ids of all leases of the cluster."""
        request = messages.new("LeaseLeasesRequest")
        answer = self.session.call(transport.LEASE_LEASES, request, safe=True, budget=budget)
        return tuple(int(status.ID) for status in answer.leases)

    def _lease(self, lease: int, budget: float | None) -> Any:
        request = messages.new("LeaseTimeToLiveRequest", ID=lease)
        try:
            answer = self.session.call(transport.LEASE_TIME_TO_LIVE, request, safe=True, budget=budget)
        except LeaseGone:
            return None
        return None if answer.TTL < 0 else answer

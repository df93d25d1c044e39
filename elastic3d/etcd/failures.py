"""What a failed call means: which of our errors, and whether the request can have been applied.

The texts are etcd's (`api/v3rpc/rpctypes/error.go`, the same in 3.4 and 3.5), since its status codes alone do not tell.
"""

from __future__ import annotations

from enum import StrEnum

from elastic3d.errors import EtcdError, EtcdRefused, EtcdUnavailable
from elastic3d.etcd.transport import RpcFailure


class OutcomeUnknown(EtcdUnavailable):
    """A write got no answer and may or may not be applied: read it back before trying again."""


class LeaseGone(EtcdError):
    """The lease is over, its keys with it; a write under it was not applied. Trying again needs a new lease."""


class Compacted(EtcdError):
    """The revision asked for was compacted away: list again at the newest."""


class Kind(StrEnum):
    """What to do about a failed call."""

    NOT_APPLIED = "not_applied"  # the request never got in: any request may be sent again, elsewhere
    UNKNOWN = "unknown"  # no answer: only a safe request may be sent again
    TOKEN = "token"  # the token is not good any more: authenticate and send again
    FINAL = "final"  # etcd answered no: the same request gets the same answer


# Refused before the request is proposed to the cluster.
_NOT_APPLIED = (
    "failed to connect to all addresses",
    "etcdserver: no leader",
    "etcdserver: not capable",
    "etcdserver: too many requests",
    "etcdserver: rpc not supported for learner",
)
_TOKEN = ("etcdserver: invalid auth token", "etcdserver: revision of auth store is old")
_NO_ANSWER_CODES = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED", "ABORTED", "INTERNAL", "UNKNOWN", "CLOSED")


def kind(failure: RpcFailure) -> Kind:
    """Return what to do about `failure`."""
    if any(text in failure.detail for text in _TOKEN):
        return Kind.TOKEN
    if failure.code == "CLOSED" or any(text in failure.detail for text in _NOT_APPLIED):
        return Kind.NOT_APPLIED
    if failure.code in _NO_ANSWER_CODES:
        return Kind.UNKNOWN
    return Kind.FINAL


def final(failure: RpcFailure) -> EtcdError:
    """Return the error for a call that etcd answered with no."""
    code, detail = failure.code, failure.detail
    if "lease not found" in detail:
        return LeaseGone("etcd: the lease is over and its keys are gone; nothing was written. Grant a new lease")
    if "has been compacted" in detail:
        return Compacted(f"etcd: {detail}; list again at the newest revision")
    if "invalid user ID or password" in detail or "user name not found" in detail:
        return EtcdRefused("etcd: wrong user name or password; trying again does not help")
    if "user name is empty" in detail or code == "UNAUTHENTICATED":
        return EtcdRefused("etcd: this cluster asks who we are; give user and password (or a client certificate)")
    if code == "PERMISSION_DENIED":
        return EtcdRefused(
            "etcd: permission denied; grant the user's role readwrite on the prefix in use "
            "(etcdctl role grant-permission ROLE --prefix=true readwrite PREFIX)"
        )
    if "database space exceeded" in detail:
        return EtcdRefused(
            "etcd: its database is full (alarm NOSPACE); compact, defragment and disarm the alarm, then try again"
        )
    if code == "UNIMPLEMENTED":
        return EtcdRefused(f"etcd: what answers does not know this request ({detail}); etcd 3.4 or later is needed")
    return EtcdRefused(f"etcd: refused: {detail or code}; the same request gets the same answer")

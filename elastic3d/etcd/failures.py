"""What a failed call means: which of our errors it is, and whether the request can have been applied.

The texts are etcd's (`api/v3rpc/rpctypes/error.go`, the same in 3.4 and 3.5): its status codes alone do not tell.
"""

from __future__ import annotations

from enum import StrEnum

from elastic3d.errors import EtcdError, EtcdRefused, EtcdUnavailable
from elastic3d.etcd.transport import RpcFailure


class OutcomeUnknown(EtcdUnavailable):
    """A write got no answer and may or may not be applied: read it back before trying again."""


class Impaired(EtcdUnavailable):
    """etcd answers but takes no writes, or does not know us any more; nothing was applied.

    Trying again helps once somebody has mended what the message names.
    """


class PasswordRefused(EtcdRefused):
    """etcd knows no such user with this password: trying again helps only where one of them is being changed."""


class LeaseGone(EtcdError):
    """The lease is over, its keys with it; a write under it was not applied. Trying again needs a new lease."""


class Compacted(EtcdError):
    """The revision asked for was compacted away: list again at the newest."""


class FutureRevision(EtcdError):
    """The revision asked for was never reached: etcd lost its data or was restored from a backup. List again."""


class FailureKind(StrEnum):
    """What to do about a failed call."""

    NOT_APPLIED = "not_applied"  # the request never got in: any request may be sent again, elsewhere
    UNKNOWN = "unknown"  # no answer: only a safe request may be sent again
    LATER = "later"  # etcd answered no, and will until somebody has mended something: nothing was applied
    TOKEN = "token"  # the token is no longer valid: authenticate and send again
    FINAL = "final"  # etcd answered no: the same request gets the same answer


_NO_LEADER = "etcdserver: no leader"
# Refused before the request is proposed to the cluster.
_NOT_APPLIED = (
    "failed to connect to all addresses",
    _NO_LEADER,
    "etcdserver: not capable",
    "etcdserver: too many requests",
    "etcdserver: rpc not supported for learner",
)
_FULL = "database space exceeded"
_NO_NAME = "user name is empty"
_WRONG = ("invalid user ID or password", "user name not found")
# The second and third mean the same: the token is older than some change of users or roles. The last one is said where
# there is none: authentication was enabled after we were told that it is not. A write is not applied in any case.
_TOKEN = (
    "etcdserver: invalid auth token",
    "etcdserver: revision of auth store is old",
    "auth: revision in header is old",
    _NO_NAME,
)
_NO_ANSWER_CODES = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED", "ABORTED", "INTERNAL", "UNKNOWN")


def kind(failure: RpcFailure) -> FailureKind:
    """Return what to do about `failure`."""
    if any(text in failure.detail for text in _TOKEN):
        return FailureKind.TOKEN
    if _FULL in failure.detail:
        return FailureKind.LATER
    if failure.code == "NOT_SENT" or any(text in failure.detail for text in _NOT_APPLIED):
        return FailureKind.NOT_APPLIED
    if failure.code in _NO_ANSWER_CODES:
        return FailureKind.UNKNOWN
    return FailureKind.FINAL


def about_us(failure: RpcFailure) -> bool:
    """Return whether etcd does not know us: a wrong password or none, or a user that is gone."""
    return any(text in failure.detail for text in (*_WRONG, _NO_NAME)) or failure.code == "UNAUTHENTICATED"


def electing(failure: RpcFailure) -> bool:
    """Return whether the member is up but has no leader to follow: for a second or two, unless a quorum is lost."""
    return _NO_LEADER in failure.detail


def later(failure: RpcFailure) -> Impaired:
    """Return the error for a call that etcd will answer with no until somebody mends what is wrong."""
    if _FULL in failure.detail:
        return Impaired(
            "etcd: its database is full (alarm NOSPACE), it takes no writes; "
            "compact and defragment it and disarm the alarm (etcdctl compact, defrag, alarm disarm)"
        )
    return Impaired(
        f"etcd: we were let in before and are refused now ({failure.detail}); "
        "if the password was changed, write the new one into the password file: it is read again"
    )


def final(failure: RpcFailure) -> EtcdError:
    """Return the error for a call that etcd answered with no."""
    code, detail = failure.code, failure.detail
    if "lease not found" in detail:
        return LeaseGone("etcd: the lease is over and its keys are gone; nothing was written. Grant a new lease")
    if "has been compacted" in detail:
        return Compacted(f"etcd: {detail}; list again at the newest revision")
    if "required revision is a future revision" in detail:
        return FutureRevision(f"etcd: {detail}; it lost its data or was restored from a backup: list again")
    if any(text in detail for text in _WRONG):
        return PasswordRefused("etcd: wrong user name or password")
    if _NO_NAME in detail or code == "UNAUTHENTICATED":
        return EtcdRefused("etcd: this cluster requires a login; give user and password (or a client certificate)")
    if code == "PERMISSION_DENIED":
        return EtcdRefused(
            "etcd: permission denied; grant the user's role readwrite on the prefix in use "
            "(etcdctl role grant-permission ROLE --prefix=true readwrite PREFIX)"
        )
    if code == "UNIMPLEMENTED":
        return EtcdRefused(f"etcd: what answers does not know this request ({detail}); etcd 3.4 or later is needed")
    return EtcdRefused(f"etcd: refused: {detail or code}; the same request gets the same answer")

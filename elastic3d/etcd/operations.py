"""Requests to etcd's store, and their results, as frozen values. Keys are text, values bytes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyValue:
    """One key as it is in the store. Revisions count the whole store's changes, `version` this key's since creation."""

    key: str
    value: bytes
    create_revision: int
    mod_revision: int
    version: int
    lease: int = 0


class CompareTarget(StrEnum):
    """The property of a key that a condition looks at."""

    VERSION = "version"
    CREATE_REVISION = "create_revision"
    MOD_REVISION = "mod_revision"
    VALUE = "value"


@dataclass(frozen=True, slots=True)
class Compare:
    """A condition of a transaction: `target` of `key` equals `expected`. A key that is not there has revisions of 0."""

    key: str
    target: CompareTarget
    expected: int | bytes

    @classmethod
    def version(cls, key: str, expected: int) -> Compare:
        """Require that `key` was written `expected` times since its creation."""
        return cls(key, CompareTarget.VERSION, expected)

    @classmethod
    def create_revision(cls, key: str, expected: int) -> Compare:
        """Require that `key` was created at this revision."""
        return cls(key, CompareTarget.CREATE_REVISION, expected)

    @classmethod
    def mod_revision(cls, key: str, expected: int) -> Compare:
        """Require that `key` was last written at this revision."""
        return cls(key, CompareTarget.MOD_REVISION, expected)

    @classmethod
    def value(cls, key: str, expected: bytes) -> Compare:
        """Require that `key` is there and holds exactly these bytes."""
        return cls(key, CompareTarget.VALUE, expected)

    @classmethod
    def absent(cls, key: str) -> Compare:
        """Require that there is no `key`."""
        return cls(key, CompareTarget.CREATE_REVISION, 0)


@dataclass(frozen=True, slots=True)
class Put:
    """Write `value` under `key`; with a lease, the key ends with it."""

    key: str
    value: bytes
    lease: int = 0


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete `key`; with `prefix`, everything that begins with it."""

    key: str
    prefix: bool = False


@dataclass(frozen=True, slots=True)
class Get:
    """Read `key`; with `prefix`, everything that begins with it."""

    key: str
    prefix: bool = False


Operation = Put | Delete | Get


@dataclass(frozen=True, slots=True, kw_only=True)
class TxnResult:
    """The result of a transaction.

    succeeded: whether the conditions held, so that the success operations ran, else the failure ones. revision: the
    store's after it; keys put by it have this `mod_revision`. gets: for each `Get` that ran, in order, its keys.
    """

    succeeded: bool
    revision: int
    gets: tuple[tuple[KeyValue, ...], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberStatus:
    """What one member says of itself. Sizes in bytes of its database: as allocated, and what of it is in use.

    leads: it is the cluster's leader; has_leader: it knows one. learner: it has no vote yet, and serves next to
    nothing. quota: beyond which it takes no writes, 0 where it does not say (before etcd 3.6). errors: alarms and the
    like, in its own words.
    """

    cluster: int
    member: int
    version: str
    leads: bool
    has_leader: bool
    learner: bool
    size: int
    in_use: int
    quota: int
    errors: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedMember:
    """A member as its cluster lists it, whether it runs or not.

    addresses: where it says that clients reach it, none before its first start. learner: it has no vote yet.
    """

    member: int
    name: str
    addresses: tuple[str, ...]
    learner: bool

"""The keys of the board and the roster, read as the core's events.

Garbage under a key must not take the job down: the key's proper writer writes it again, and what is in the way is
swept. Records of a newer elastic3d are another matter: if everybody has to obey them, this member cannot take part.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

from elastic3d import etcd_keys as keys
from elastic3d.errors import ConfigurationError
from elastic3d.etcd import KeyValue
from elastic3d.membership import events as e
from elastic3d.membership.injection import FaultOrder
from elastic3d.membership.records import (
    SCHEMA,
    BaseUnknown,
    Claim,
    Doubt,
    Drain,
    End,
    Flap,
    MemberRecord,
    NewerSchema,
    Proposal,
    Quarantine,
    Report,
    Tomb,
    decode,
)
from elastic3d.membership.stalls import Stall
from elastic3d.values import Generation

T = TypeVar("T")

_OBEYED = (keys.LEADER, keys.GENERATION, keys.PROPOSAL, keys.END)


class Read(Protocol):
    """How `read` is called."""

    def __call__(
        self, root: str, item: KeyValue, *, base: Generation | None = None, whole: bytes | None = None
    ) -> e.OfRoster | e.OfBoard | e.Broken | None:
        """Return the event of one key."""


def sealed(root: str, items: Iterable[KeyValue]) -> Generation | None:
    """Return the generation in a listing of all that begins with `etcd_keys.LISTED`; ConfigurationError for garbage."""
    there = {item.key: item.value for item in items}
    key = root + keys.GENERATION
    value = there.get(key)
    return None if value is None else decode(Generation, value, key, whole=there.get(keys.whole(key), b""))


def read(
    root: str, item: KeyValue, *, base: Generation | None = None, whole: bytes | None = None
) -> e.OfRoster | e.OfBoard | e.Broken | None:
    """Return the event of one key, None for an unknown key. base, whole: as `records.decode` takes them."""
    kind, name = keys.split(root, item.key)
    at = item.mod_revision

    def record(of: type[T]) -> T:
        return decode(of, item.value, item.key, base=base, whole=whole)

    try:
        match kind:
            case keys.MEMBERS:
                member = record(MemberRecord)
                if member.node.id != name:
                    raise ConfigurationError(f"etcd key {item.key} holds the record of {member.node.id}")
                return e.MemberPut(record=member, order=item.create_revision, revision=at)
            case keys.REPORTS:
                return e.ReportPut(id=name, report=record(Report), revision=at)
            case keys.DRAINS:
                return e.DrainPut(name=name, drain=record(Drain), revision=at)
            case keys.QUARANTINE:
                return e.QuarantinePut(place=name, quarantine=record(Quarantine), revision=at)
            case keys.FLAPS:
                return e.FlapPut(place=name, flap=record(Flap), revision=at)
            case keys.STALLS:
                stall = record(Stall)
                if stall.incarnation != name.partition("@")[2]:
                    raise ConfigurationError(f"etcd key {item.key} holds the stall of {stall.incarnation}")
                return e.StallPut(id=name, stall=stall, created=item.create_revision, revision=at)
            case keys.TOMBS:
                return e.TombPut(id=name, tomb=record(Tomb), revision=at)
            case keys.DOUBTS:
                return e.DoubtPut(id=name, doubt=record(Doubt), revision=at)
            case keys.FAULTS:
                id = name.rpartition("/")[0]
                return e.FaultOrdered(id=id, order=record(FaultOrder), key=item.key, lease=item.lease, revision=at)
            case keys.LEADER:
                return e.LeaderPut(claim=record(Claim), revision=at)
            case keys.GENERATION:
                return e.GenerationPut(generation=record(Generation), revision=at)
            case keys.PROPOSAL:
                return e.ProposalPut(proposal=record(Proposal), revision=at)
            case keys.END:
                return e.EndPut(end=record(End), revision=at)
            case _:
                return None
    except BaseUnknown:
        raise
    except NewerSchema as error:
        if kind == keys.MEMBERS:
            detail = (
                f"its record is of a newer elastic3d than the job's, which reads schemas up to {SCHEMA}: "
                "upgrade the job's nodes, or start this one with their version"
            )
            return e.Unreadable(id=name, detail=detail, revision=at)
        return e.Broken(detail=str(error)) if kind in _OBEYED else None
    except ConfigurationError as error:
        return _garbage(kind, name, at, str(error))


def _garbage(kind: str, name: str, at: int, detail: str) -> e.OfRoster | e.OfBoard | None:
    match kind:
        case keys.MEMBERS:
            return e.Unreadable(id=name, detail=detail, revision=at)
        case keys.LEADER:
            return e.LeaderGone(revision=at, token=at)
        case keys.GENERATION:
            return e.GenerationSpoiled(revision=at, stands=at)
        case keys.PROPOSAL:
            return e.ProposalGone(revision=at)
        case keys.TOMBS | keys.DOUBTS | keys.FAULTS | keys.DRAINS | keys.QUARANTINE | keys.FLAPS:
            return e.Garbage(key=kind + name, revision=at)
        case keys.END:
            return e.Garbage(key=kind, revision=at)
        case keys.STALLS:
            return e.StallGone(id=name, revision=at)
        case _:
            return None  # a report: its member notices, and writes it again


def gone(root: str, key: str, revision: int) -> e.OfRoster | e.OfBoard | None:
    """Return the event of a key that was deleted or whose lease ran out."""
    kind, name = keys.split(root, key)
    match kind:
        case keys.MEMBERS:
            return e.MemberGone(id=name, revision=revision)
        case keys.REPORTS:
            return e.ReportGone(id=name, revision=revision)
        case keys.DRAINS:
            return e.DrainGone(name=name, revision=revision)
        case keys.QUARANTINE:
            return e.QuarantineGone(place=name, revision=revision)
        case keys.FLAPS:
            return e.FlapGone(place=name, revision=revision)
        case keys.STALLS:
            return e.StallGone(id=name, revision=revision)
        case keys.TOMBS:
            return e.TombGone(id=name, revision=revision)
        case keys.DOUBTS:
            return e.DoubtGone(id=name, revision=revision)
        case keys.LEADER:
            return e.LeaderGone(revision=revision)
        case keys.GENERATION:
            return e.GenerationSpoiled(revision=revision, stands=0)
        case keys.PROPOSAL:
            return e.ProposalGone(revision=revision)
        case _:
            return None


class Reader:
    """Reads one watch of the board: listings, and then change after change.

    It knows the newest generation that the watch delivered: the next record may hold only changes against it.
    """

    def __init__(self, root: str, *, read: Read = read) -> None:
        self._root, self._read = root, read
        self._generation: Generation | None = None

    def listed(self, items: Sequence[KeyValue]) -> list[e.OfRoster | e.OfBoard | e.Broken]:
        """Return the events of a listing of all keys that begin with `etcd_keys.LISTED`."""
        wholes = {item.key: item.value for item in items if item.key.startswith(self._root + keys.WHOLE)}
        self._generation = None
        events = []
        for item in items:
            said = self._read(self._root, item, whole=wholes.get(keys.whole(item.key), b""))
            if isinstance(said, e.GenerationPut):
                self._generation = said.generation
            if said is not None:
                events.append(said)
        return events

    def changed(self, key: str, item: KeyValue | None, revision: int) -> e.OfRoster | e.OfBoard | e.Broken | None:
        """Return the event of a key that was written or deleted; BaseUnknown if the board must be listed."""
        if item is None:
            said: e.OfRoster | e.OfBoard | e.Broken | None = gone(self._root, key, revision)
        else:
            said = self._read(self._root, item, base=self._generation)
        if isinstance(said, e.GenerationPut):
            self._generation = said.generation
        elif isinstance(said, e.GenerationSpoiled):
            self._generation = None
        return said

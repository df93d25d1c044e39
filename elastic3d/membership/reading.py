"""What the keys of the board and the roster say, as the core's events.

Garbage under a key must not take the job down: who should have written there writes again, and what is in the way is
swept. What a newer elastic3d wrote is another matter: where everybody has to obey it, this member cannot take part.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

from elastic3d.errors import ConfigurationError
from elastic3d.etcd import KeyValue
from elastic3d.membership import events as e
from elastic3d.membership.records import (
    SCHEMA,
    WHOLE,
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
    whole_key,
)
from elastic3d.values import Generation

T = TypeVar("T")

_OBEYED = ("board/leader", "board/generation", "board/proposal", "board/end")


class Read(Protocol):
    """How `read` is called."""

    def __call__(
        self, root: str, item: KeyValue, *, base: Generation | None = None, whole: bytes | None = None
    ) -> e.OfRoster | e.OfBoard | e.Broken | None:
        """Return what one key says."""


def sealed(root: str, items: Iterable[KeyValue]) -> Generation | None:
    """Return the generation in a listing of all that begins with `records.LISTED`; ConfigurationError for garbage."""
    there = {item.key: item.value for item in items}
    key = root + "board/generation"
    value = there.get(key)
    return None if value is None else decode(Generation, value, key, whole=there.get(whole_key(key), b""))


def read(
    root: str, item: KeyValue, *, base: Generation | None = None, whole: bytes | None = None
) -> e.OfRoster | e.OfBoard | e.Broken | None:
    """Return what one key says, None for a key that is nobody's. base, whole: as `records.decode` takes them."""
    kind, name = _split(root, item.key)
    at = item.mod_revision

    def record(of: type[T]) -> T:
        return decode(of, item.value, item.key, base=base, whole=whole)

    try:
        match kind:
            case "roll/members":
                found = record(MemberRecord)
                if found.node.id != name:
                    raise ConfigurationError(f"etcd key {item.key} holds the record of {found.node.id}")
                return e.MemberPut(record=found, order=item.create_revision, revision=at)
            case "roll/reports":
                return e.ReportPut(id=name, report=record(Report), revision=at)
            case "roll/drains":
                return e.DrainPut(name=name, drain=record(Drain), revision=at)
            case "roll/quarantine":
                return e.QuarantinePut(place=name, quarantine=record(Quarantine), revision=at)
            case "roll/flaps":
                return e.FlapPut(place=name, flap=record(Flap), revision=at)
            case "board/tombs":
                return e.TombPut(id=name, tomb=record(Tomb), revision=at)
            case "board/doubts":
                return e.DoubtPut(id=name, doubt=record(Doubt), revision=at)
            case "board/leader":
                return e.LeaderPut(claim=record(Claim), revision=at)
            case "board/generation":
                return e.GenerationPut(generation=record(Generation), revision=at)
            case "board/proposal":
                return e.ProposalPut(proposal=record(Proposal), revision=at)
            case "board/end":
                return e.EndPut(end=record(End), revision=at)
            case _:
                return None
    except BaseUnknown:
        raise
    except NewerSchema as error:
        if kind == "roll/members":
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
        case "roll/members":
            return e.Unreadable(id=name, detail=detail, revision=at)
        case "board/leader":
            return e.LeaderGone(revision=at, token=at)
        case "board/generation":
            return e.GenerationSpoiled(revision=at, stands=at)
        case "board/proposal":
            return e.ProposalGone(revision=at)
        case "board/tombs" | "board/doubts" | "roll/drains" | "roll/quarantine" | "roll/flaps":
            return e.Garbage(key=f"{kind}/{name}", revision=at)
        case "board/end":
            return e.Garbage(key=kind, revision=at)
        case _:
            return None  # a report: its member finds it out, and writes it again


def gone(root: str, key: str, revision: int) -> e.OfRoster | e.OfBoard | None:
    """Return what it means that a key was deleted or ran out."""
    kind, name = _split(root, key)
    match kind:
        case "roll/members":
            return e.MemberGone(id=name, revision=revision)
        case "roll/reports":
            return e.ReportGone(id=name, revision=revision)
        case "roll/drains":
            return e.DrainGone(name=name, revision=revision)
        case "roll/quarantine":
            return e.QuarantineGone(place=name, revision=revision)
        case "roll/flaps":
            return e.FlapGone(place=name, revision=revision)
        case "board/tombs":
            return e.TombGone(id=name, revision=revision)
        case "board/doubts":
            return e.DoubtGone(id=name, revision=revision)
        case "board/leader":
            return e.LeaderGone(revision=revision)
        case "board/generation":
            return e.GenerationSpoiled(revision=revision, stands=0)
        case "board/proposal":
            return e.ProposalGone(revision=revision)
        case _:
            return None


class Reader:
    """Reads one watch of the board: listings, and then change after change.

    It knows the newest generation that the watch delivered, of which the next record may say only what changed.
    """

    def __init__(self, root: str, *, read: Read = read) -> None:
        self._root, self._read = root, read
        self._generation: Generation | None = None

    def listed(self, items: Sequence[KeyValue]) -> list[e.OfRoster | e.OfBoard | e.Broken]:
        """Return what a listing of all that begins with `records.LISTED` says."""
        wholes = {item.key: item.value for item in items if item.key.startswith(self._root + WHOLE)}
        self._generation = None
        found = []
        for item in items:
            said = self._read(self._root, item, whole=wholes.get(whole_key(item.key), b""))
            if isinstance(said, e.GenerationPut):
                self._generation = said.generation
            if said is not None:
                found.append(said)
        return found

    def changed(self, key: str, item: KeyValue | None, revision: int) -> e.OfRoster | e.OfBoard | e.Broken | None:
        """Return what it says that a key was written, or was deleted; BaseUnknown where the board must be listed."""
        if item is None:
            said: e.OfRoster | e.OfBoard | e.Broken | None = gone(self._root, key, revision)
        else:
            said = self._read(self._root, item, base=self._generation)
        if isinstance(said, e.GenerationPut):
            self._generation = said.generation
        elif isinstance(said, e.GenerationSpoiled):
            self._generation = None
        return said


def _split(root: str, key: str) -> tuple[str, str]:
    """Return ("roll/members", "a@1") for a key of many, ("board/leader", "") for a key that is one."""
    tier, _, rest = key.removeprefix(root).partition("/")
    kind, _, name = rest.partition("/")
    return f"{tier}/{kind}", name

"""What a key of the board or the roll says, as the core's events.

Garbage under a key must not take the job down: who should have written there writes again, and what is in the way is
swept. What a newer elastic3d wrote is another matter: where everybody has to obey it, this member cannot take part.
"""

from __future__ import annotations

from typing import TypeVar

from elastic3d.errors import ConfigurationError
from elastic3d.etcd import KeyValue
from elastic3d.membership import events as e
from elastic3d.membership.records import (
    SCHEMA,
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
from elastic3d.values import Generation

T = TypeVar("T")

_OBEYED = ("board/leader", "board/generation", "board/proposal", "board/end")


def read(root: str, item: KeyValue) -> e.OfRoll | e.OfBoard | e.Broken | None:
    """Return what one key says, None for a key that is nobody's."""
    kind, name = _split(root, item.key)
    at = item.mod_revision

    def record(of: type[T]) -> T:
        return decode(of, item.value, item.key)

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


def _garbage(kind: str, name: str, at: int, detail: str) -> e.OfRoll | e.OfBoard | None:
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


def gone(root: str, key: str, revision: int) -> e.OfRoll | e.OfBoard | None:
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


def _split(root: str, key: str) -> tuple[str, str]:
    """Return ("roll/members", "a@1") for a key of many, ("board/leader", "") for a key that is one."""
    tier, _, rest = key.removeprefix(root).partition("/")
    kind, _, name = rest.partition("/")
    return f"{tier}/{kind}", name

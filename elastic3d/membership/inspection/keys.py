"""All keys under one run's root, parsed for people: whatever cannot be read is named, not raised."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from elastic3d import etcd_keys as keys
from elastic3d.errors import ConfigurationError
from elastic3d.etcd import KeyValue
from elastic3d.membership.records import (
    Claim,
    Doubt,
    Drain,
    End,
    Flap,
    GenerationHistory,
    MemberRecord,
    Proposal,
    Pulse,
    Quarantine,
    Report,
    Tomb,
    decode,
)
from elastic3d.values import Generation, to_json


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionCheck:
    """One thing a node checked of itself before it took part."""

    name: str
    ok: bool
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionFailure:
    """A node that failed its admission, in its own words."""

    node: str
    address: str = ""
    checks: tuple[AdmissionCheck, ...]


@dataclass(slots=True, kw_only=True)
class RunKeys:
    """Every record of a run by the name in its key. leases: of keys that have one. problems: what cannot be read."""

    leader: Claim | None = None
    generation: Generation | None = None
    proposal: Proposal | None = None
    end: End | None = None
    members: dict[str, MemberRecord] = field(default_factory=dict)
    reports: dict[str, Report] = field(default_factory=dict)
    tombs: dict[str, Tomb] = field(default_factory=dict)
    doubts: dict[str, Doubt] = field(default_factory=dict)
    drains: dict[str, Drain] = field(default_factory=dict)
    quarantine: dict[str, Quarantine] = field(default_factory=dict)
    flaps: dict[str, Flap] = field(default_factory=dict)
    pulses: dict[str, Pulse] = field(default_factory=dict)
    history: dict[str, GenerationHistory] = field(default_factory=dict)
    refused: dict[str, AdmissionFailure] = field(default_factory=dict)
    leases: dict[str, int] = field(default_factory=dict)
    unreadable: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


_ONE: dict[str, tuple[str, type[Any]]] = {
    keys.LEADER: ("leader", Claim),
    keys.GENERATION: ("generation", Generation),
    keys.PROPOSAL: ("proposal", Proposal),
    keys.END: ("end", End),
}
_MANY: dict[str, tuple[str, type[Any]]] = {
    keys.MEMBERS: ("members", MemberRecord),
    keys.REPORTS: ("reports", Report),
    keys.TOMBS: ("tombs", Tomb),
    keys.DOUBTS: ("doubts", Doubt),
    keys.DRAINS: ("drains", Drain),
    keys.QUARANTINE: ("quarantine", Quarantine),
    keys.FLAPS: ("flaps", Flap),
    keys.PULSES: ("pulses", Pulse),
    keys.HISTORY: ("history", GenerationHistory),
    keys.REFUSED: ("refused", AdmissionFailure),
}
_WHOLE = (keys.whole(keys.GENERATION), keys.whole(keys.PROPOSAL))
# Their few floats are never shown, and they are long.
_UNCHECKED = (Generation, Proposal, MemberRecord)


def find(root: str, items: Iterable[KeyValue]) -> RunKeys:
    """Return the records of one listing."""
    found = RunKeys()
    items = tuple(items)
    wholes = {item.key: item.value for item in items if item.key.startswith(root + keys.WHOLE)}
    for item in items:
        below = item.key.removeprefix(root)
        if below == keys.SECRET or below in _WHOLE:
            continue
        try:
            if below in _ONE:
                name, kind = _ONE[below]
                setattr(found, name, _record(kind, item, wholes.get(keys.whole(item.key), b"")))
                continue
            head = next((head for head in _MANY if below.startswith(head) and below != head), None)
            if head is None:
                raise ConfigurationError(f"etcd key {item.key} is not one that this elastic3d knows")
            name, kind = _MANY[head]
            _add(found, name, below.removeprefix(head), _record(kind, item), item)
        except ConfigurationError as error:
            found.problems.append(str(error))
            if below.startswith(keys.MEMBERS):
                found.unreadable[below.removeprefix(keys.MEMBERS)] = str(error)
    return found


def history(root: str, items: Iterable[KeyValue]) -> tuple[list[GenerationHistory], list[str]]:
    """Return the generations that were sealed, oldest first, and which keys cannot be read."""
    found = find(root, (item for item in items if item.key.startswith(root + keys.HISTORY)))
    told = sorted(found.history.values(), key=lambda history: (history.number, history.attempt))
    return told, found.problems


def _add(found: RunKeys, name: str, key: str, record: Any, item: KeyValue) -> None:
    if name == "members" and record.node.id != key:
        raise ConfigurationError(f"etcd key {item.key} holds the record of {record.node.id}")
    getattr(found, name)[key] = record
    if item.lease and name in ("quarantine", "flaps", "refused"):
        found.leases[f"{name}/{key}"] = item.lease


def _record(kind: type[Any], item: KeyValue, whole: bytes | None = None) -> Any:
    record = decode(kind, item.value, item.key, whole=whole)
    if kind not in _UNCHECKED and not _finite(to_json(record)):
        raise ConfigurationError(f"etcd key {item.key} holds a number that is not finite")
    return record


def _finite(data: Any) -> bool:
    if isinstance(data, dict):
        return all(map(_finite, data.values()))
    if isinstance(data, list):
        return all(map(_finite, data))
    return not isinstance(data, float) or math.isfinite(data)

"""All keys under one run's root, parsed for people: whatever cannot be read is named, not raised."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from elastic3d import etcd_keys as keys
from elastic3d.accounting.live_record import GoodputRecord
from elastic3d.errors import ConfigurationError
from elastic3d.etcd import KeyValue
from elastic3d.membership.injection import FaultOrder
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
from elastic3d.membership.stalls import Stall, Verdict
from elastic3d.values import Generation, to_json

T = TypeVar("T")


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
    goodput: GoodputRecord | None = None
    members: dict[str, MemberRecord] = field(default_factory=dict)
    reports: dict[str, Report] = field(default_factory=dict)
    tombs: dict[str, Tomb] = field(default_factory=dict)
    doubts: dict[str, Doubt] = field(default_factory=dict)
    faults: dict[str, FaultOrder] = field(default_factory=dict)
    drains: dict[str, Drain] = field(default_factory=dict)
    quarantine: dict[str, Quarantine] = field(default_factory=dict)
    flaps: dict[str, Flap] = field(default_factory=dict)
    stalls: dict[str, Stall] = field(default_factory=dict)
    pulses: dict[str, Pulse] = field(default_factory=dict)
    history: dict[str, GenerationHistory] = field(default_factory=dict)
    verdicts: dict[str, Verdict] = field(default_factory=dict)
    refused: dict[str, AdmissionFailure] = field(default_factory=dict)
    leases: dict[str, int] = field(default_factory=dict)
    unreadable: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


_MANY: dict[str, tuple[type[Any], Callable[[RunKeys], dict[str, Any]]]] = {
    keys.MEMBERS: (MemberRecord, lambda run_keys: run_keys.members),
    keys.REPORTS: (Report, lambda run_keys: run_keys.reports),
    keys.TOMBS: (Tomb, lambda run_keys: run_keys.tombs),
    keys.DOUBTS: (Doubt, lambda run_keys: run_keys.doubts),
    keys.FAULTS: (FaultOrder, lambda run_keys: run_keys.faults),
    keys.DRAINS: (Drain, lambda run_keys: run_keys.drains),
    keys.QUARANTINE: (Quarantine, lambda run_keys: run_keys.quarantine),
    keys.FLAPS: (Flap, lambda run_keys: run_keys.flaps),
    keys.STALLS: (Stall, lambda run_keys: run_keys.stalls),
    keys.PULSES: (Pulse, lambda run_keys: run_keys.pulses),
    keys.HISTORY: (GenerationHistory, lambda run_keys: run_keys.history),
    keys.VERDICTS: (Verdict, lambda run_keys: run_keys.verdicts),
    keys.REFUSED: (AdmissionFailure, lambda run_keys: run_keys.refused),
}
_LEASED = {keys.QUARANTINE: "quarantine", keys.FLAPS: "flaps", keys.REFUSED: "refused"}
_WHOLE = (keys.whole(keys.GENERATION), keys.whole(keys.PROPOSAL))
# Their few floats are never shown, and they are long.
_UNCHECKED = (Generation, Proposal, MemberRecord)


def find(root: str, items: Iterable[KeyValue]) -> RunKeys:
    """Return the records of one listing."""
    run_keys = RunKeys()
    items = tuple(items)
    wholes = {item.key: item.value for item in items if item.key.startswith(root + keys.WHOLE)}
    for item in items:
        below = item.key.removeprefix(root)
        if below in (keys.SECRET, keys.LAST_END, *_WHOLE):
            continue
        try:
            whole = wholes.get(keys.whole(item.key), b"")
            match below:
                case keys.LEADER:
                    run_keys.leader = _record(Claim, item)
                case keys.GENERATION:
                    run_keys.generation = _record(Generation, item, whole)
                case keys.PROPOSAL:
                    run_keys.proposal = _record(Proposal, item, whole)
                case keys.END:
                    run_keys.end = _record(End, item)
                case keys.GOODPUT:
                    run_keys.goodput = _record(GoodputRecord, item)
                case _:
                    _add(run_keys, below, item)
        except ConfigurationError as error:
            run_keys.problems.append(str(error))
            if below.startswith(keys.MEMBERS):
                run_keys.unreadable[below.removeprefix(keys.MEMBERS)] = str(error)
    return run_keys


def history(root: str, items: Iterable[KeyValue]) -> tuple[list[GenerationHistory], list[str]]:
    """Return the generations that were sealed, oldest first, and which keys cannot be read."""
    run_keys = find(root, (item for item in items if item.key.startswith(root + keys.HISTORY)))
    generations = sorted(run_keys.history.values(), key=lambda history: (history.number, history.attempt))
    return generations, run_keys.problems


def verdicts(root: str, items: Iterable[KeyValue]) -> tuple[list[Verdict], list[str]]:
    """Return what was found about generations, that of the oldest first, and which keys cannot be read."""
    run_keys = find(root, (item for item in items if item.key.startswith(root + keys.VERDICTS)))
    return [run_keys.verdicts[key] for key in sorted(run_keys.verdicts)], run_keys.problems


def _add(run_keys: RunKeys, below: str, item: KeyValue) -> None:
    head = next((head for head in _MANY if below.startswith(head) and below != head), None)
    if head is None:
        raise ConfigurationError(f"etcd key {item.key} is not one that this elastic3d knows")
    kind, of = _MANY[head]
    key, record = below.removeprefix(head), _record(kind, item)
    if isinstance(record, MemberRecord) and record.node.id != key:
        raise ConfigurationError(f"etcd key {item.key} holds the record of {record.node.id}")
    of(run_keys)[key] = record
    if item.lease and head in _LEASED:
        run_keys.leases[f"{_LEASED[head]}/{key}"] = item.lease


def _record(kind: type[T], item: KeyValue, whole: bytes | None = None) -> T:
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

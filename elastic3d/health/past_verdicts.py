"""Verdicts that a run left in its folder of events: in evidence bundles, and in the leaders' events.

Nothing of it is believed: files may be half written, huge, or not ours. What cannot be read is left out and said.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from elastic3d.health.evidence import FOLDER, STALLS, VERDICT
from elastic3d.membership.stalls import RankStall, Stall, Verdict, VerdictKind
from elastic3d.values import from_json

BUNDLES = 200
"""Most bundles that are read, of the newest generations."""

LARGEST = 64 << 20
"""Most bytes of a file of a bundle; what 10,000 ranks said takes a tenth of it."""

UNREADABLE = (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)
"""What reading a file or an event raises that is not such as elastic3d writes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PastVerdict:
    """A verdict with what is known of how it came about.

    stalls: what each node said of its ranks, by its id. evidence: folders for people.
    """

    verdict: Verdict
    stalls: Mapping[str, tuple[RankStall, ...]] = field(default_factory=dict)
    evidence: tuple[str, ...] = ()


def read_bundles(folder: Path) -> tuple[tuple[PastVerdict, ...], tuple[str, ...]]:
    """Return the verdicts of a folder of events that have evidence, oldest first, and what could not be read."""
    verdicts: list[PastVerdict] = []
    problems: list[str] = []
    try:
        paths = sorted((folder / FOLDER).glob(f"*/{VERDICT}"), key=lambda path: (*_order(path), path))
    except OSError as error:
        return (), (f"{folder / FOLDER} cannot be read: {error.strerror}",)
    if len(paths) > BUNDLES:
        problems.append(f"{len(paths) - BUNDLES} older bundles of evidence were left out")
    for path in paths[-BUNDLES:]:
        try:
            verdict = from_json(Verdict, _load(path))
            place_of(verdict)
        except UNREADABLE as error:
            problems.append(f"{path} holds no verdict, and is left out: {error}")
            continue
        stalls: dict[str, tuple[RankStall, ...]] = {}
        said = path.with_name(STALLS)
        try:
            if said.exists():
                stalls = {id: from_json(Stall, stall).ranks for id, stall in _load(said)["stalls"].items()}
        except UNREADABLE as error:
            problems.append(f"{said} does not say what ranks were at, and is left out: {error}")
        evidence = tuple(sorted(str(bundle) for bundle in (folder / FOLDER).glob(f"{verdict.key}-*")))
        verdicts.append(PastVerdict(verdict=verdict, stalls=stalls, evidence=evidence))
    return tuple(verdicts), tuple(problems)


_KINDS: Mapping[str, tuple[VerdictKind, str]] = {
    "layout.rebalanced": (VerdictKind.SLOW, "remedy"),
    "memory.short": (VerdictKind.MEMORY, "rung"),
    "rank.stuck": (VerdictKind.STUCK, "fault"),
    "training.stalled": (VerdictKind.STUCK, "fault"),
}
"""Of each event that tells a verdict, its kind and the field that has the fault."""

EVENTS_OF_VERDICTS = tuple(_KINDS)
"""The events of which `event_verdict` knows."""

_NOBODY: Mapping[str, Any] = {"nodes": (), "ranks": (), "act": False}


def event_verdict(name: str, fields: Mapping[str, Any]) -> Verdict | None:
    """Return what an event of a leader tells; None for other events, and for nonsense.

    Of ranks that stood still, a bundle of evidence tells more.
    """
    if name not in _KINDS:
        return None
    kind, fault = _KINDS[name]
    said = {**fields, **_NOBODY} if name == "training.stalled" else fields
    try:
        verdict = Verdict(
            kind=kind,
            fault=str(said[fault]),
            key=str(int(said["generation"])),
            step=int(said["step"]),
            detail=str(said["detail"]),
            culprits=tuple(map(str, said["nodes"])),
            ranks=tuple(map(int, said["ranks"])),
            act=bool(said["act"]),
        )
        if kind is VerdictKind.SLOW:
            before, after, rungs = float(said["before"]), float(said["after"]), tuple(map(str, said["rungs"]))
            return replace(verdict, before=before, after=after, rungs=rungs)
        if kind is VerdictKind.STUCK:
            return replace(verdict, confidence=float(said["confidence"]), waits=tuple(map(str, said["waits"])))
        return verdict
    except UNREADABLE:
        return None


def _load(path: Path) -> Any:
    with path.open("rb") as file:
        text = file.read(LARGEST + 1)
    if len(text) > LARGEST:
        raise ValueError(f"it has more than {LARGEST >> 20} MiB")
    return json.loads(text)


def place_of(verdict: Verdict) -> tuple[int, int]:
    """Return a verdict's generation and attempt; ValueError if its key names none."""
    number, _, attempt = verdict.key.partition(".")
    return int(number), int(attempt or 0)


def _order(path: Path) -> tuple[int, int]:
    """Return the generation and attempt of a bundle by its folder's name."""
    number, _, attempt = path.parent.name.partition("-")[0].partition(".")
    return int(number) if number.isdecimal() else 0, int(attempt) if attempt.isdecimal() else 0

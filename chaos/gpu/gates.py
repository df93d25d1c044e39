"""The gates: what the figures must show before a promise for GPUs is made."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

Line = Mapping[str, Any]
"""One line of output, as parsed from JSON."""

BACK_WITHIN = 2.0
SNAPSHOT_SPEED = 25.0
SNAPSHOT_SLOWDOWN = 3.0
VOTE_STALL = 0.02 * 200.0
GENERATIONS = 20


class Verdict(StrEnum):
    """How a gate was judged."""

    PASS = "pass"
    FAIL = "fail"
    NOT_MEASURED = "not measured"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """One gate, and how it was judged. wanted, evidence: for people."""

    name: str
    wanted: str
    verdict: Verdict
    evidence: str = ""


def judge(lines: Sequence[Line]) -> tuple[Gate, ...]:
    """Return all gates. Figures of time and speed count on a real device alone, equal bits on any."""
    figures = [line for line in lines if "figure" in line and "error" not in line and line.get("value") is not None]
    real = [line for line in figures if line.get("device") == "cuda"]
    return (
        _digests(figures, [line for line in lines if "figure" in line and "error" in line]),
        _most(real, "memory_back", BACK_WITHIN, "s", "memory back after reaping"),
        _least(real, "snapshot_copy", SNAPSHOT_SPEED, "GB/s", "snapshots copied"),
        _most(real, "snapshot_slowdown", SNAPSHOT_SLOWDOWN, "%", "slowdown of training while one is copied"),
        _most(real, "vote_stall", VOTE_STALL, "ms", "stall of the vote, in a step of 200 ms"),
        _generations(figures),
    )


def table(gates: Iterable[Gate]) -> str:
    """Return the gates for people."""
    rows = [("gate", "wanted", "verdict", "evidence")]
    rows += [(gate.name, gate.wanted, gate.verdict.value, gate.evidence) for gate in gates]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return "\n".join("  ".join([*map(str.ljust, row[:3], widths), row[3]]).rstrip() for row in rows)


def _digests(figures: Sequence[Line], errors: Sequence[Line]) -> Gate:
    """Digests of one group must be equal; a group of one proves nothing, and a digest that failed is no digest."""
    name, wanted = "equal bits", "one digest in each group"
    groups: dict[str, list[Line]] = {}
    for line in figures:
        if line["figure"] == "digest":
            groups.setdefault(f"{line['stage']} {line['group']}", []).append(line)
    unlike = []
    for group, members in groups.items():
        # What most of them say stands for the group, so that the odd one is named.
        values = [str(member["value"]) for member in members]
        common = max(sorted(set(values)), key=values.count)
        unlike += [
            f"{group}: {member['case']}" for member, value in zip(members, values, strict=True) if value != common
        ]
    failed = [f"{line['stage']} {line.get('case', '')}" for line in errors if line["figure"] == "digest"]
    if unlike:
        return Gate(name=name, wanted=wanted, verdict=Verdict.FAIL, evidence="differ: " + "; ".join(unlike))
    if failed:
        return Gate(name=name, wanted=wanted, verdict=Verdict.FAIL, evidence="no digest of: " + "; ".join(failed))
    compared = [members for members in groups.values() if len(members) > 1]
    if not compared:
        return Gate(name=name, wanted=wanted, verdict=Verdict.NOT_MEASURED)
    evidence = f"{sum(map(len, compared))} digests in {len(compared)} groups"
    return Gate(name=name, wanted=wanted, verdict=Verdict.PASS, evidence=evidence)


def _most(figures: Sequence[Line], figure: str, bound: float, unit: str, name: str) -> Gate:
    return _bounded(figures, figure, name, f"at most {bound:g} {unit}", unit, max, lambda value: value <= bound)


def _least(figures: Sequence[Line], figure: str, bound: float, unit: str, name: str) -> Gate:
    return _bounded(figures, figure, name, f"at least {bound:g} {unit}", unit, min, lambda value: value >= bound)


def _bounded(
    figures: Sequence[Line],
    figure: str,
    name: str,
    wanted: str,
    unit: str,
    worst: Callable[[Iterable[float]], float],
    holds: Callable[[float], bool],
) -> Gate:
    values = [float(line["value"]) for line in figures if line["figure"] == figure]
    if not values:
        return Gate(name=name, wanted=wanted, verdict=Verdict.NOT_MEASURED)
    value = worst(values)
    verdict = Verdict.PASS if holds(value) else Verdict.FAIL
    return Gate(name=name, wanted=wanted, verdict=verdict, evidence=f"{value:.3g} {unit}, the worst of {len(values)}")


def _generations(figures: Sequence[Line]) -> Gate:
    """Count generations that began on a device which the one before had just held."""
    name, wanted = "no generation out of memory", f"none in {GENERATIONS}"
    begun = sum(int(line["value"]) for line in figures if line["figure"] == "generations")
    short = sum(int(line["value"]) for line in figures if line["figure"] == "out_of_memory")
    verdict = Verdict.FAIL if short else Verdict.PASS if begun >= GENERATIONS else Verdict.NOT_MEASURED
    return Gate(name=name, wanted=wanted, verdict=verdict, evidence=f"{short} in {begun}" if begun else "")

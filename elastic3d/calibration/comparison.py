"""Two calibrations of one machine: what got slower or faster from the older to the newer one.

A link is compared by the times that were measured for its smallest and its largest message, not by the line through all
of them: where the line begins says little of either.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from elastic3d.calibration.record import BlockTimes, Calibration, MeasuredLink
from elastic3d.errors import UsageError

TOLERANCE = "10%"


class SpeedChange(StrEnum):
    """What became of one speed."""

    SAME = "same"
    SLOWER = "slower"
    FASTER = "faster"
    UNKNOWN = "unknown"
    """One of the two did not measure it, or measured something else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedSpeed:
    """One speed in two calibrations."""

    what: str
    """The name of the line."""
    means: str
    """What was measured, and what depends on it, in words."""
    unit: str
    """Of both figures: `FLOP/s`, `B/s`, where more is faster, or `s`, where less is."""
    before: float | None
    """In the older calibration, None where it was not measured."""
    after: float | None
    """In the newer one, likewise."""
    ratio: float | None
    """The newer speed by the older: below 1 is slower, whatever the unit; None where they cannot be compared."""
    change: SpeedChange
    """Beyond the tolerance or not."""
    why: str = ""
    """Why they cannot be compared, "" where they can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two calibrations of one kind of device, compared."""

    before: str
    """When the older one was made."""
    after: str
    """When the newer one was."""
    tolerance: float
    """The share by which a speed may differ and count as the same."""
    notes: tuple[str, ...]
    """What else differs and may be why, in words."""
    speeds: tuple[ComparedSpeed, ...]
    """Line by line."""
    slower: int
    """How many of them are slower."""
    faster: int
    """How many are faster."""


def parse_tolerance(text: str) -> float:
    """Return the share that `10%` or `0.1` names, from 0 to below 1; UsageError for anything else."""
    match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)( ?%)?", text.strip())
    share = -1.0 if match is None else float(match[1]) / (100 if match[2] else 1)
    if not 0 <= share < 1:
        raise UsageError(f"--tolerance {text!r}: give a share of the speed below 100%, such as 10% or 0.1")
    return share


def check_same(old: Calibration, *, device: str, name: str, number: str, threads: int) -> None:
    """Raise UsageError where another device was measured than `old` was made on, or in another way.

    name: its maker's, "" where it is not known yet.
    """
    if (old.device, old.name) != (device, name or old.name):
        raise UsageError(
            f"--compare: the older calibration is of another device, {old.name} ({old.device}), and this one is "
            f"{name or 'another'} ({device}): compare calibrations of the same"
        )
    if old.number != number:
        raise UsageError(
            f"--compare: the older calibration multiplied in {old.number}, and this one in {number}: give "
            f"--precision {old.number}"
        )
    if old.threads != threads:
        raise UsageError(
            f"--compare: the older calibration used threads={old.threads}, and this one {threads}: give "
            f"--threads {old.threads}"
        )


def compare(old: Calibration, new: Calibration, tolerance: float) -> Comparison:
    """Return what got slower or faster; UsageError if they are not of the same kind of device."""
    check_same(old, device=new.device, name=new.name, number=new.number, threads=new.threads)
    speeds = tuple(_judged(one, tolerance) for one in _speeds(old, new))
    return Comparison(
        before=old.made,
        after=new.made,
        tolerance=tolerance,
        notes=tuple(_notes(old, new)),
        speeds=speeds,
        slower=sum(one.change is SpeedChange.SLOWER for one in speeds),
        faster=sum(one.change is SpeedChange.FASTER for one in speeds),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pair:
    what: str
    means: str
    unit: str
    before: float | None
    after: float | None
    why: str = ""


def _judged(one: _Pair, tolerance: float) -> ComparedSpeed:
    ratio, change, why = None, SpeedChange.UNKNOWN, one.why
    if one.before is None or one.after is None:
        now = "before, and not now" if one.before is not None else "now, and not before"
        why = why or f"measured {now}"
    elif not why:
        ratio = one.before / one.after if one.unit == "s" else one.after / one.before
        slower, faster = ratio < 1 - tolerance, ratio > 1 + tolerance
        change = SpeedChange.SLOWER if slower else SpeedChange.FASTER if faster else SpeedChange.SAME
    return ComparedSpeed(
        what=one.what,
        means=one.means,
        unit=one.unit,
        before=one.before,
        after=one.after,
        ratio=ratio,
        change=change,
        why=why,
    )


def _speeds(old: Calibration, new: Calibration) -> Iterator[_Pair]:
    yield _Pair(
        what="products",
        means=f"matrix products in {new.number}, which are most of a step's computing",
        unit="FLOP/s",
        before=old.flops,
        after=new.flops,
    )
    yield _Pair(
        what="memory",
        means="copies within a slot's memory: norms, activations, the optimizer, and snapshots",
        unit="B/s",
        before=old.memory_bandwidth,
        after=new.memory_bandwidth,
    )
    yield from _links("inside a node", "slots of one node", old.inside, new.inside)
    yield from _links("between nodes", "two nodes", old.between, new.between)
    yield from _blocks(old.block, new.block)


def _links(place: str, ends: str, old: MeasuredLink | None, new: MeasuredLink | None) -> Iterator[_Pair]:
    if old is None and new is None:
        return
    before = {} if old is None else {one.bytes: one.seconds for one in old.samples if one.seconds > 0}
    after = {} if new is None else {one.bytes: one.seconds for one in new.samples if one.seconds > 0}
    sizes = sorted(before.keys() & after.keys()) or sorted(before.keys() | after.keys())
    why = ""
    if old is not None and new is not None:
        if (old.backend, old.ranks) != (new.backend, new.ranks):
            why = f"{old.backend} between {old.ranks} before, {new.backend} between {new.ranks} now"
        elif not before.keys() & after.keys():
            why = "messages of other sizes"
    if not sizes:
        return
    uses = (("small", sizes[0], "votes, and messages of pipelines"), ("large", sizes[-1], "gradients and parameters"))
    for name, size, use in uses:
        yield _Pair(
            what=f"{place}, {name}",
            means=f"an exchange of {size:,} bytes between {ends}: {use}",
            unit="s",
            before=before.get(size),
            after=after.get(size),
            why=why,
        )


def _blocks(old: BlockTimes | None, new: BlockTimes | None) -> Iterator[_Pair]:
    if old is None and new is None:
        return
    why = "of another model" if old is not None and new is not None and old.model != new.model else ""
    yield _Pair(
        what="block, forward",
        means="the forward of one block of the script's model on one micro-batch",
        unit="s",
        before=None if old is None else old.forward,
        after=None if new is None else new.forward,
        why=why,
    )
    yield _Pair(
        what="block, backward",
        means="the backward of that block",
        unit="s",
        before=None if old is None else old.backward,
        after=None if new is None else new.backward,
        why=why,
    )


def _notes(old: Calibration, new: Calibration) -> Iterator[str]:
    for what, before, after in (
        ("host", old.host, new.host),
        ("torch", old.torch, new.torch),
        ("cores", old.cores, new.cores),
        ("memory of a slot, in bytes,", old.memory, new.memory),
    ):
        if before != after:
            yield f"{what} was {before} and is {after}"

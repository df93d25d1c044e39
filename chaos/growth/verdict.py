"""What a soak shows as a whole: passed, failed, or too short to tell."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from chaos.growth.measures import Measure
from chaos.growth.soak import Soak


class SoakVerdict(StrEnum):
    """What a soak shows: `passed` only if it was long enough to tell, and `short` where nothing is wrong as far as
    anything was measured."""

    PASSED = "passed"
    FAILED = "failed"
    SHORT = "short"


def verdict(soak: Soak, series: Sequence[Measure]) -> SoakVerdict:
    """Return whether it failed, passed, or was too short to say that nothing grows."""
    if soak.broken or soak.error or any(measure.grows for measure in series):
        return SoakVerdict.FAILED
    return SoakVerdict.SHORT if lacking(soak, series) else SoakVerdict.PASSED


def lacking(soak: Soak, series: Sequence[Measure]) -> tuple[str, ...]:
    """Return what a soak lacks for saying that nothing grows, each as a sentence's part; empty where it may say so."""
    lacks = []
    if soak.interrupted:
        lacks.append("it was interrupted, and no promise was judged")
    elif soak.trained < soak.plan.seconds:
        lacks.append(f"faults were made for {soak.trained:.0f} s of {soak.plan.seconds:.0f} s")
    if not soak.made:
        lacks.append("no fault was made")
    judged = [measure for measure in series if measure.bar is not None]
    short = [f"{measure.group.name}: {measure.name}" for measure in judged if measure.line is None]
    if len(short) == len(judged):
        lacks.append("no series with a bar has points enough for a line")
    elif short:
        lacks.append(f"too few points for a line: {', '.join(short)}")
    if soak.samples and not any(sample.etcd for sample in soak.samples):
        lacks.append("etcd was in no sample")
    return tuple(lacks)


def wrong(soak: Soak, series: Sequence[Measure]) -> tuple[str, ...]:
    """Return what grows, which promises were broken, and what ended it."""
    grown = (f"grows: {measure.group.name}: {measure.name}" for measure in series if measure.grows)
    return (*grown, *soak.broken, *([f"ended by an error: {soak.error}"] if soak.error else []))

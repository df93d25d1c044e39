"""Bars of time: how soon a fault has to be noticed, and how soon the next step has to follow it.

What a loaded machine takes says nothing of the product, so times are told with every run and judged only where somebody
sets bars: on a machine of their own, with a script whose steps they know.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from chaos.judging import endings
from chaos.judging.notices import Notice
from chaos.judging.promise import Promise
from chaos.playing.outcome import Outcome
from elastic3d.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Bars:
    """What is asked of times. noticed: by which factor of the catalogue's bar a fault has to be noticed; recovered:
    seconds from a fault to the next step. None: told only. UsageError where one is no positive number."""

    noticed: float | None = None
    recovered: float | None = None

    def __post_init__(self) -> None:
        for option, value in (("--bars", self.noticed), ("--recovery", self.recovered)):
            if value is not None and not (math.isfinite(value) and value > 0):
                raise UsageError(f"{option} {value:g}: it has to be a positive number")


def promises(outcome: Outcome, noticed: Sequence[Notice], bars: Bars) -> Iterator[Promise]:
    """Yield what the bars promise, judged by what was made until the job ended.

    A fault that nobody had time to notice, or after which no step was left to make, is not counted.
    """
    ended = max((event.at for event in outcome.events), default=-math.inf)
    if bars.noticed is not None:
        yield _noticed(outcome, noticed, bars.noticed, ended)
    if bars.recovered is not None:
        yield _recovered(outcome, bars.recovered, ended)


def _noticed(outcome: Outcome, noticed: Sequence[Notice], factor: float, ended: float) -> Promise:
    # Notices come in the order of what was made, those without a detector left out.
    at = [moment for fault, moment in outcome.made if fault.ABOUT.detector]
    late, judged = [], []
    for notice, begin in zip(noticed, at, strict=True):
        bar = notice.fault.ABOUT.bar * factor
        if not bar or (notice.after is None and ended - begin < bar):
            continue
        judged.append(notice)
        if notice.after is None:
            late.append(f"{notice.fault}: no {notice.detector} within {bar:g} s, nor later")
        elif notice.after > bar:
            late.append(f"{notice.fault}: {notice.detector} after {notice.after:.1f} s, its bar is {bar:g} s")
    slowest = max((notice.after for notice in judged if notice.after is not None), default=math.inf)
    return Promise(
        says=f"a fault is noticed within {factor:g} times its bar",
        page="reference/faults.md",
        seen=f"{len(judged)} faults, the slowest after {slowest:.1f} s"
        if judged
        else "no fault with a bar had the time",
        broken=tuple(late),
        judged=bool(judged),
    )


def _recovered(outcome: Outcome, bar: float, ended: float) -> Promise:
    steps = sorted((event.at, event.generation) for event in outcome.events if event.name == "step.committed")
    whole = outcome.picture.step == outcome.setting.steps or endings.of_job(outcome) is not None
    late, took = [], []
    for fault, at in outcome.made:
        number = _formed(outcome, at)
        after = next((step - at for step, generation in steps if step > at and generation >= number), math.inf)
        if math.isinf(after) and (whole or ended - at < bar):
            continue
        took.append(after)
        if after > bar:
            what = "no step followed" if math.isinf(after) else f"the next step came after {after:.1f} s"
            late.append(f"{fault}: {what}, asked for are {bar:g} s")
    return Promise(
        says=f"the next step comes within {bar:g} s of a fault",
        page="guides/chaos.md",
        seen=f"{len(took)} faults, at most {max(took):.1f} s" if took else "no fault was followed by so much time",
        broken=tuple(late),
        judged=bool(took),
    )


def _formed(outcome: Outcome, at: float) -> int:
    """Return the generation that was formed next after a fault and before another one, 0 where none was.

    Trainers may go on for a while after what ends their generation: those steps are none that follow it.
    """
    until = min((moment for _, moment in outcome.made if moment > at), default=math.inf)
    formed = (int(e.fields["number"]) for e in outcome.events if e.name == "generation.sealed" and at < e.at < until)
    return min(formed, default=0)

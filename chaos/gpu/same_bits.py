"""P6: the bits of ten steps in every layout, in fresh processes, over a kill, and of a large model's start."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from typing import Any

from chaos.gpu.bench import Bench
from chaos.gpu.forked import ChildFailed
from chaos.gpu.worlds import Task, run_world
from elastic3d.clock import SYSTEM
from elastic3d.values import Layout

STEPS, KILL = 10, 5
WORLD_LIMIT = 60.0
ENOUGH = 5.0
"""Seconds with which a world is begun."""

CUT_SHORT = 2.0
"""Seconds left of the stage at which a world that has not answered was ended for want of time."""


def measure(bench: Bench) -> None:
    """Say a digest for each world; those of one group must be equal."""
    plain = Task(
        layout=Layout(pp=1, dp=1),
        kind=bench.kind,
        width=64 if bench.small else 512,
        blocks=2 if bench.small else 6,
        context=32 if bench.small else 256,
        steps=KILL + 1 if bench.small else STEPS,
    )
    few, many = _layouts(small=bench.small)
    bits = f"{plain.steps} steps, bf16, dropout, clipping, recompute"
    _digest(bench, bits, plain, "first time")
    for layout in few:
        _digest(bench, bits, _of(plain, layout, bench), "first time")
    _killed(bench, bits, plain)
    _large(bench, plain)
    for layout in many:
        _digest(bench, bits, _of(plain, layout, bench), "first time")
    fp32 = replace(plain, precision="fp32", recompute="none")
    for layout in few[:2]:
        _digest(bench, f"{plain.steps} steps, fp32, dropout, clipping", _of(fp32, layout, bench), "first time")
    if bench.cuda:
        for layout in (plain.layout, *few):
            fused = _of(replace(plain, fused=True), layout, bench)
            _digest(bench, f"{plain.steps} steps, fused AdamW", fused, "first time")
    _digest(bench, bits, plain, "second time")
    if not bench.small:
        for layout in (*few, *many):
            _digest(bench, bits, _of(plain, layout, bench), "second time")


def _layouts(*, small: bool) -> tuple[list[Layout], list[Layout]]:
    """Return the layouts that come first, and those that come where there is time."""
    first = [Layout(pp=1, dp=2, zero=3), Layout(pp=2, dp=1), Layout(pp=1, dp=3, zero=2)]
    if small:
        return first[:2], []
    rest = [Layout(pp=1, dp=4, zero=3), Layout(pp=2, dp=2, zero=2), Layout(pp=1, dp=2, zero=2)]
    return first, [*rest, Layout(pp=1, dp=3, zero=3), Layout(pp=1, dp=4, zero=2)]


def _of(task: Task, layout: Layout, bench: Bench) -> Task:
    return replace(task, layout=layout, kind=bench.shared_kind if layout.world > 1 else bench.kind)


def _digest(bench: Bench, group: str, task: Task, which: str) -> None:
    """Run one world and say its digest, or why there is none."""
    case = f"{task}, {which}"
    began = SYSTEM.monotonic()
    said = _run(bench, group, case, task)
    if not said:
        return
    # One that began anew would end with the same bits, and prove nothing.
    if task.take and said[0]["restored"] != f"memory {KILL}":
        bench.failed("digest", f"it began from {said[0]['restored']!r}", group=group, case=case)
        return
    digests = " ".join(sorted({one["digest"] for one in said}))
    bench.say("digest", digests, group=group, case=case, seconds=round(SYSTEM.monotonic() - began, 2))


def _run(bench: Bench, group: str, case: str, task: Task) -> list[dict[str, Any]] | None:
    """Return what the ranks of a world say, None where it failed; a world that was cut short by the stage's limit
    did not fail."""
    late = f"{group}: {case}: no time left"
    if bench.left() < ENOUGH:
        bench.say("skipped", late)
        return None
    with bench.attempting("digest", group=group, case=case):
        try:
            return run_world(task, limit=_limit(bench))
        except ChildFailed:
            if bench.left() > CUT_SHORT:
                raise
            bench.say("skipped", late)
    return None


def _limit(bench: Bench) -> float:
    """Return the seconds for one world: one that hangs leaves the others their time."""
    return min(bench.left() - 1.0, 240.0 if bench.small else WORLD_LIMIT)


def _killed(bench: Bench, group: str, plain: Task) -> None:
    """Kill all ranks of one layout after a step's snapshot, and go on in another from what was copied."""
    with tempfile.TemporaryDirectory() as folder:
        first = _of(plain, Layout(pp=1, dp=2, zero=2), bench)
        if _run(bench, group, "the part before the kill", replace(first, keep=folder, die_at=KILL)) is None:
            return
        _digest(bench, group, replace(plain, take=folder), "after a kill")
        _digest(bench, group, replace(_of(plain, Layout(pp=2, dp=1), bench), take=folder), "after a kill")


def _large(bench: Bench, plain: Task) -> None:
    """Build a model as one too large for a host, whose draws are made on the device."""
    group = "a large model's initial weights"
    for layout in (Layout(pp=1, dp=1), Layout(pp=2, dp=1), Layout(pp=1, dp=2)):
        _digest(bench, group, _of(replace(plain, large=True, steps=0), layout, bench), "first time")

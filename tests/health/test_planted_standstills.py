"""Mistakes that blame the wrong rank for a standstill, or nobody's, show within a few of them."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from elastic3d.health import evidence, stuck, watch
from elastic3d.health.evidence import EvidenceWriter, processes
from elastic3d.health.options import Watching
from elastic3d.health.record import SIZE
from elastic3d.health.watch import INTERVAL, SlotWatch, Taken
from elastic3d.membership.stalls import RankStall, RankState, Stall
from elastic3d.values import Generation, Layout
from tests.health.standstill import STEPS, generation, program, stalls, standstill
from tests.health.test_watch import Hands, Trainer

Plant = Callable[[pytest.MonkeyPatch], None]

LAYOUTS = (Layout(pp=1, dp=4), Layout(pp=2, dp=2), Layout(pp=4, dp=1), Layout(pp=2, dp=2, tp=2))


def violations() -> list[str]:
    """Let each rank of some jobs stand still, and look at what is found, told and kept."""
    wrong = [each for layout in LAYOUTS for rank in range(layout.world) for each in judged(layout, rank)]
    return [*wrong, *watched(), *kept()]


def judged(layout: Layout, culprit: int) -> list[str]:
    """Return what is wrong about the verdict on a rank that stands still, now and in a later generation."""
    steps = {rank: [program(layout, rank) for _ in range(STEPS)] for rank in range(layout.world)}
    where = sum(map(len, steps[culprit][:-1])) + len(steps[culprit][-1]) // 2
    ranks = standstill(layout, steps, {culprit: where})
    # Silence spreads from the one at fault to those who wait for it, and then to those who wait for them.
    ranks = {n: replace(rank, silent=6_000 - 100 * (n != culprit) - 10 * n) for n, rank in ranks.items()}
    whole = generation(layout)
    held = stuck.judge(whole, stalls(whole, ranks), 0.0)
    wrong = [] if held is not None and held.ranks == (culprit,) else [f"rank {culprit} of {layout} is not named"]
    later = replace(whole, number=whole.number + 1)
    if stuck.judge(later, stalls(whole, ranks), 0.0) is not None:
        wrong.append("a generation is judged by what was said of the one before")
    return wrong


def watched() -> list[str]:
    """Return what is wrong about a watch of a healthy rank, on a machine that is suspended for a minute."""
    clock = Hands()
    trainer = Trainer(clock)
    told: list[str] = []
    one = SlotWatch(
        watching=Watching(),
        silent=lambda number, stall, over: told.append("a rank is silent for time that its machine was suspended"),
        moving=lambda number: None,
        taken=lambda taken: None,
        clock=clock,
    )
    try:
        one.begin(1, pid=trainer.pid, rank=0, generation="2.0", page=trainer.page)
        one.look()
        clock.now += 60.0
        for _ in range(10):
            one.look()
            clock.now += INTERVAL
            trainer.writer.beat(caught=False)
    finally:
        trainer.end()
    return told


def kept() -> list[str]:
    """Return what is wrong about the evidence of a rank that is killed while the disk is slow."""
    process = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
    free = threading.Event()
    with tempfile.TemporaryDirectory() as folder:
        writer = EvidenceWriter(folder, "n0", 0, limit=1 << 20)
        try:
            writer._post(lambda: _wait(free))
            stall = RankStall(
                rank=0, step=3, made=3, phase="forward", silent=4_000, allowed_idle=3_000, allowed_busy=30_000,
                beat=100, state=RankState.IDLE,
            )  # fmt: skip
            writer.take(Taken(trainer=1, generation="2.0", pid=process.pid, stall=stall, page=bytes(SIZE)))
        finally:
            process.kill()
            process.wait()
            free.set()
        assert writer.flush(30)
        said = [path.read_text() for path in Path(folder).glob("*/*/slot0/proc.txt")]
    return [] if said and "state" in said[0] else ["nothing is known of a process that was killed"]


def _wait(event: threading.Event) -> None:
    event.wait(30)


def name_who_waits_least(patch: pytest.MonkeyPatch) -> None:
    """The rank that fell silent last is taken for the one that the others wait for."""

    def last(case: stuck._Case, number: int) -> bool:
        return case.ranks[number].silent == min(rank.silent for rank in case.ranks.values())

    patch.setattr(stuck._Case, "waits_for_nobody", last)


def forgive_no_time(patch: pytest.MonkeyPatch) -> None:
    """Time in which the keeper did not run counts as silence of its ranks."""
    patch.setattr(watch, "PAUSE", float("inf"))


def judge_without_key(patch: pytest.MonkeyPatch) -> None:
    """Stalls count whatever generation they are about."""
    of = stuck._Case.of

    def of_any(one: Generation, said: Mapping[str, Stall]) -> stuck._Case | None:
        return of(one, {id: replace(stall, key=one.key) for id, stall in said.items()})

    patch.setattr(stuck._Case, "of", of_any)


def look_after_the_kill(patch: pytest.MonkeyPatch) -> None:
    """Processes are looked at when the disk is free, and not when their rank is reported."""

    def take(self: EvidenceWriter, taken: Taken) -> None:
        self._post(lambda: self._take(taken, processes(taken.pid)))

    patch.setattr(evidence.EvidenceWriter, "take", take)


def test_a_standstill_is_blamed_on_who_stands_still() -> None:
    """Whatever the layout, with evidence, and never on who only lost time with its machine."""
    assert violations() == []


@pytest.mark.parametrize("plant", [name_who_waits_least, forgive_no_time, judge_without_key, look_after_the_kill])
def test_a_planted_bug_shows(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each mistake is one that a careless change could make."""
    plant(monkeypatch)
    assert violations()

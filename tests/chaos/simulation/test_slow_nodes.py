"""Nodes that are slow for a while, in virtual time: what is done for their sake loses nothing and stays rare."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from chaos.simulation.run import play
from chaos.simulation.schedule import Do, Schedule, draw, parse
from elastic3d.membership import actions as acts
from elastic3d.membership.machine import balance, forming, paces
from elastic3d.membership.machine.view import View
from elastic3d.planner.remedy import Rung
from elastic3d.values import Generation
from tests.chaos.simulation.test_planted_bugs import Plant, it_is_found

FLAPS = "\n".join(f"{3 + 12 * at}.0 slow n2 for 6" for at in range(12))


def lines_of(schedule: Schedule) -> str:
    """Play a schedule, and return what was written; fail where an invariant did not hold."""
    outcome = play(schedule, lines=True)
    assert outcome.violations == []
    return "\n".join(line for line in outcome.lines if "GenerationPut" in line)


def test_a_spare_takes_over_and_a_stage_is_cut_anew() -> None:
    """With a spare and without one; the second also finds its way back."""
    swapped = lines_of(parse("job seed=7 members=5 minimum=2 maximum=4\n3.0 slow n2 for 30"))
    assert "a spare takes its place" in swapped
    cut = lines_of(parse("job seed=7 members=4 minimum=2 maximum=4\n3.0 slow n2 for 30"))
    assert "gets less to compute" in cut
    assert "is well again" in cut


def test_a_node_that_flaps_changes_the_job_a_few_times_at_most() -> None:
    """The checker counts; the same holds while etcd changes its leader."""
    text = f"job seed=3 members=4 minimum=2 maximum=4\n{FLAPS}"
    assert 1 <= lines_of(parse(text)).count("balance") <= 6
    lines_of(parse(f"{text}\n20.0 kill leader\n22.0 start n4\n50.0 etcd-elect for 1"))


def test_random_faults_of_jobs_with_slow_nodes() -> None:
    """Whatever else happens meanwhile."""
    played = 0
    for schedule in slow_schedules():
        assert play(schedule).violations == [], str(schedule)
        played += 1
    assert played == SEEDS


SEEDS = 8


def slow_schedules() -> Iterator[Schedule]:
    """Yield schedules in which nodes are slow."""
    drawn = (schedule for schedule in map(draw, range(1, 1000)) if any(c.do is Do.SLOW for c in schedule.commands))
    for _ in range(SEEDS):
        yield next(drawn)


def follow_every_whim(patch: pytest.MonkeyPatch) -> None:
    """A change costs the same however often it was made for the same machine."""
    patch.setattr(Rung, "price", property(lambda self: self.cost))


def change_at_once(patch: pytest.MonkeyPatch) -> None:
    """Nobody is asked to leave at a boundary first."""

    def seal(view: View, generation: Generation, **_: Any) -> acts.Seal:
        return forming.seal(view, generation)

    patch.setattr(balance, "forming", SimpleNamespace(**{**vars(forming), "propose": seal}))


def put_the_slow_out(patch: pytest.MonkeyPatch) -> None:
    """A node whose place a spare takes is no part of the next generation."""

    def formed_of(*given: Any) -> Generation:
        return replace(forming.formed_of(*given), spares=())

    patch.setattr(balance, "forming", SimpleNamespace(**{**vars(forming), "formed_of": formed_of}))


def forget_the_recovered(patch: pytest.MonkeyPatch) -> None:
    """A machine is known until it is well, though the layout is still the one for a slow one."""
    patch.setattr(paces, "slow_ones", lambda _: {})


@pytest.mark.parametrize(
    ("plant", "words"),
    [
        (follow_every_whim, "its price allows"),
        (change_at_once, "had not left|goes back"),
        (put_the_slow_out, "without one that was there|without cause"),
        (forget_the_recovered, "its record counts it for none"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_planted_bug_about_slow_nodes_is_found(plant: Plant, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a job with a node that flaps, in one with a spare, or in one that loses another node meanwhile."""
    flapping = parse(f"job seed=3 members=4 minimum=2 maximum=4\n{FLAPS}")
    spare = parse("job seed=7 members=5 minimum=2 maximum=4\n3.0 slow n2 for 30")
    lost = parse("job seed=5 members=5 minimum=2 maximum=5\n3.0 slow n2 for 12\n4.5 kill n5")
    it_is_found(plant, words, monkeypatch, [spare, flapping, lost])

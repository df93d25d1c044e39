"""Random schedules of the commit protocol: nothing is torn, lost or wrong."""

from __future__ import annotations

import pytest

from chaos.commits.model import Fault, ModelStore
from chaos.commits.run import play, play_many
from chaos.commits.schedule import Job, Schedule, Turns, draw, parse
from elastic3d.errors import UsageError


@pytest.mark.parametrize(
    "first",
    [
        1,
        pytest.param(251, marks=pytest.mark.long),
        *(pytest.param(n, marks=pytest.mark.slow) for n in range(501, 1_001, 250)),
    ],
)
def test_random_schedules_break_no_invariant(first: int) -> None:
    """In 1,000 random schedules, most of which commit something and refuse something."""
    tally = play_many(first, 250)
    assert not tally.failures, tally.failures[0].report()
    assert tally.counts["commits"] > 250
    assert tally.counts["refusals"] > 250


@pytest.mark.slow
@pytest.mark.timeout(4 * 3600)
def test_very_many_random_schedules_break_no_invariant() -> None:
    """The same for 100,000."""
    tally = play_many(10_001, 100_000)
    assert not tally.failures, tally.failures[0].report()


@pytest.mark.parametrize("seed", [3, 14, 159])
def test_a_schedule_is_deterministic(seed: int) -> None:
    """It always gives the same operations and the same objects, to the byte, and so does its text."""
    stores = [ModelStore() for _ in range(3)]
    schedule = draw(seed)
    for store, one in zip(stores, (schedule, schedule, parse(str(schedule))), strict=True):
        play(one, store=store)
    assert stores[0].lines == stores[1].lines == stores[2].lines
    assert stores[0].objects == stores[1].objects == stores[2].objects


def test_drawn_schedules_contain_every_fault() -> None:
    """On operations that change something."""
    happened: set[str] = set()
    for seed in range(1, 120):
        store = ModelStore()
        store.lines = type(store.lines)(maxlen=10_000)
        play(draw(seed), store=store)
        happened |= {
            line.rpartition(": ")[2] for line in store.lines if line.split()[2] in ("put", "create", "swap", "list")
        }
    assert {fault.value for fault in Fault if fault} - happened == set()
    assert "arrives" in happened


def test_a_late_swap_by_a_dead_leader_is_fenced_off() -> None:
    """Its request arrives after the next leader's fence and changes nothing."""
    job = Job(seed=1, ranks=1, generations=2, steps=1)
    lines = (
        Turns(actor="leader1", turns=100),
        Turns(actor="rank1.0", turns=100),
        Turns(actor="leader1", kind="swap", fault=Fault.LATE),
        Turns(actor="leader2", turns=2),
        Turns(actor="network", turns=1),
    )
    store = ModelStore()
    outcome = play(Schedule(job=job, lines=lines), store=store)
    assert outcome.violations == []
    assert any("arrives" in line and "swap refs/latest" in line for line in store.lines), "\n".join(store.lines)


@pytest.mark.parametrize("text", ["leader1 3", "run seed=1\nleader1 x", "run seed=1\nleader1 3 explodes", "run six=1"])
def test_a_text_that_is_no_schedule_is_refused(text: str) -> None:
    """The message quotes the line."""
    with pytest.raises(UsageError, match="schedule: "):
        parse(text)

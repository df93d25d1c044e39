"""Audits follow what they cost: they stay within their budget, and every rank draws them from the same schedule."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from elastic3d.health.audit import AuditPlan, audit_at, plan
from elastic3d.health.audit_schedule import KEPT, LEAST, NEAR, NEAREST, AuditSchedule, AuditTimes, AuditTurns, begun
from elastic3d.owners import Owners
from elastic3d.values import Layout

LAYOUT, COUNT = Layout(pp=1, dp=4), 16


def planned(budget: float, count: int = COUNT) -> AuditPlan:
    return plan(LAYOUT, budget=budget, blocks=8, counts=[count], nodes=range(4))


def played(schedule: AuditSchedule, *, steps: int, cost: float, seed: int) -> tuple[list[int], AuditSchedule]:
    """Return which of so many steps are audited if an audit takes `cost` steps, and the schedule that they lead to."""
    audited, times = [], AuditTimes()
    for step in range(schedule.began, schedule.began + steps):
        known = times.cost
        due = audit_at(schedule.at(step), step, seed=seed, owners=Owners(dp=4), micro_batches=COUNT) is not None
        times.made(2.0 * (1.0 + due * cost), audited=due)
        if due:
            audited.append(step)
            schedule = schedule.after(step, known)
    return audited, schedule


@given(
    cost=st.floats(0.1, 1.0),
    budget=st.sampled_from([0.005, 0.01, 0.02, 0.05]),
    began=st.integers(0, 500),
    seed=st.integers(0, 1 << 30),
)
@settings(max_examples=60, deadline=None)
@example(cost=0.375, budget=0.05, began=126, seed=1015)
def test_audits_stay_within_their_budget_whatever_they_cost(cost: float, budget: float, began: int, seed: int) -> None:
    """At every moment two audits ahead of it at most, once their cost is known; and most of it is made use of."""
    first = begun(planned(budget), budget=budget, step=began)
    steps = math.ceil(40 / budget)
    audited, last = played(first, steps=steps, cost=cost, seed=seed)
    # The first ones have too few steps before them to be compared with.
    measured = [step for number, step in enumerate(audited) if 2 * (step - began - number) >= NEAREST]
    known = measured[LEAST]
    caught_up = began + audited.index(known) * cost / budget
    for number, step in enumerate(audited, 1):
        if step > max(known, caught_up):
            assert number * cost <= budget * (step - began + 1) + 2 * cost + 1e-6
    assert len(audited) * cost <= budget * steps + 2 * cost
    assert len(audited) * cost >= 0.6 * budget * steps
    assert last.known == pytest.approx(cost / 0.25)


@given(cost=st.floats(0.1, 1.0), seed=st.integers(0, 1 << 30))
@settings(max_examples=40, deadline=None)
def test_no_more_steps_lie_between_two_audits_than_is_said(cost: float, seed: int) -> None:
    """Once the cost is known, a device that computes wrongly is audited within two runs of `every` steps."""
    _, known = played(begun(planned(0.01), budget=0.01, step=0), steps=2000, cost=cost, seed=seed)
    every = known.newest.every
    assert every <= math.ceil(cost / 0.01 / NEAR)
    audited, last = played(begun(known.newest, budget=0.01, step=4000), steps=4000, cost=cost, seed=seed)
    gaps = [after - before for before, after in itertools.pairwise(audited)]
    assert max(gaps) < 2 * max(every, last.newest.every)


def test_audits_as_dear_as_their_rounds_change_nothing() -> None:
    """One round of four is a quarter of a step, as the plan has it: one audit in 25 steps."""
    first = begun(planned(0.01), budget=0.01, step=0)
    audited, last = played(first, steps=2000, cost=0.25, seed=1)
    assert (len(audited), last.plans) == (80, first.plans)


def test_dearer_audits_come_more_rarely_and_make_up_for_what_they_took() -> None:
    """Four at a quarter of a step were held before anybody knew that they take nearly half of one."""
    first = begun(planned(0.01), budget=0.01, step=0)
    audited, last = played(first, steps=5000, cost=0.45, seed=1)
    (_, before), (end, after) = last.plans
    assert (before.every, end, after.every, after.since) == (25, 100, 45, 135)
    assert all(not 100 <= step < 135 for step in audited)
    assert (len(audited) - 1) * 0.45 <= 0.01 * 5000


def test_a_generation_begins_with_what_is_known() -> None:
    """In proportion to its own rounds: half as many of them make an audit twice as dear, and twice as rare."""
    known = begun(planned(0.01), budget=0.01, step=700, known=1.8)
    assert (known.newest.every, known.at(700)) == (45, known.newest)
    shorter = begun(planned(0.01, 8), budget=0.01, step=700, known=1.8)
    assert shorter.newest.every == 90


def test_nothing_is_known_before_enough_steps_were_measured() -> None:
    """Neither by one audit, which anything may have held up, nor without steps to compare it with."""
    times = AuditTimes()
    times.made(9.0, audited=True)
    for _ in range(LEAST - 1):
        for _ in range(NEAREST):
            times.made(1.0, audited=False)
        times.made(1.5, audited=True)
    assert times.cost is None
    times.made(1.5, audited=True)
    assert times.cost == pytest.approx(0.5)
    assert LEAST - 1 <= KEPT // 2
    for _ in range(LEAST - 1):
        times.made(60.0, audited=True)
    assert times.cost == pytest.approx(0.5)


def test_what_was_loaded_before_a_schedule_is_known() -> None:
    """A loader that is ahead notes for which step it asked, so that what it took by another schedule is loaded anew."""
    first = begun(planned(0.01), budget=0.01, step=0)
    turns = AuditTurns(first)
    assert turns.ask(7) is turns.ask(3) is first.newest
    assert turns.asked == 7

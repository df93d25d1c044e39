"""Audits come as often as their budget allows, everybody is audited by everybody, and no step's own work changes."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic3d.data.micro_batches import PASSED_OVER
from elastic3d.health.audit import AuditPlan, audit_at, coverage, plan, replayed, shifts
from elastic3d.owners import Owners
from elastic3d.planner.extra_rounds import RAREST, extra_rounds
from elastic3d.values import Layout, Schedule


def nodes_of(layout: Layout, slots: int) -> list[int]:
    return [rank // slots for rank in range(layout.world)]


def test_the_budget_sets_how_often() -> None:
    """One extra round of four rounds costs a quarter of a step: at 1 %, one step in 25."""
    layout = Layout(pp=1, dp=4)
    made = plan(layout, budget=0.01, blocks=8, counts=[16], nodes=nodes_of(layout, 1))
    assert (made.every, made.extra, made.shifts) == (25, 1, (1, 2, 3))
    assert plan(layout, budget=1.0, blocks=8, counts=[16], nodes=nodes_of(layout, 1)).every == 1


def test_what_keeps_a_run_from_being_audited_is_said() -> None:
    """Nobody is to believe that a run is watched which is not."""
    alone = Layout(pp=2, dp=1)
    assert "dp=1" in plan(alone, budget=0.01, blocks=8, counts=[16], nodes=[0, 1]).why
    pair = Layout(pp=1, dp=2)
    off = plan(pair, budget=0.0, blocks=8, counts=[16], nodes=[0, 1])
    assert off.why == "audits are off"
    assert audit_at(off, 3, seed=1, owners=Owners(dp=2), micro_batches=16) is None


def test_a_schedule_in_turns_takes_as_many_rounds_as_fill_them() -> None:
    """Zero bubble over two ranks goes on with 4 + 2 rounds, and not with 4 + 1."""
    layout = Layout(pp=2, dp=2, zero=2, schedule=Schedule.ZERO_BUBBLE, virtual=2)
    assert extra_rounds(layout, blocks=8, counts=[8]) == 2
    assert extra_rounds(Layout(pp=2, dp=2), blocks=8, counts=[8]) == 1


def test_columns_of_other_nodes_are_preferred() -> None:
    """Two slots a node, dp 4 over two nodes: a shift of 2 never stays on a node."""
    layout = Layout(pp=1, dp=4)
    assert shifts(layout, nodes_of(layout, 2)) == (2,)
    assert shifts(layout, nodes_of(layout, 4)) == (1, 2, 3)
    assert shifts(layout, nodes_of(layout, 1)) == (1, 2, 3)


@given(
    every=st.integers(1, 40),
    dp=st.integers(2, 9),
    micro_batches=st.integers(9, 40),
    extra=st.integers(1, 3),
    seed=st.integers(0, 1 << 30),
    window=st.integers(0, 1000),
)
@settings(max_examples=200, deadline=None)
def test_one_step_of_each_window_is_audited(
    every: int, dp: int, micro_batches: int, extra: int, seed: int, window: int
) -> None:
    """And in it each column replays a micro-batch that really counts, and that it did not run itself."""
    made = AuditPlan(every=every, extra=extra, shifts=tuple(range(1, dp)))
    steps = range(window * every, (window + 1) * every)
    audits = [audit_at(made, step, seed=seed, owners=Owners(dp=dp), micro_batches=micro_batches) for step in steps]
    (one,) = [audit for audit in audits if audit is not None]
    for column in range(dp):
        replayed = one.replays(column, Owners(dp=dp), micro_batches)
        assert len(replayed) == extra
        for number in replayed:
            assert 0 <= number < micro_batches
            assert number % dp == (column + one.shift) % dp != column
            assert (micro_batches * PASSED_OVER + number) % micro_batches == number


@given(
    shares=st.lists(st.integers(1, 5), min_size=2, max_size=5).map(tuple),
    more=st.integers(0, 12),
    step=st.integers(0, 1000),
)
def test_with_unequal_shares_each_column_replays_what_another_one_ran(
    shares: tuple[int, ...], more: int, step: int
) -> None:
    """Also where the audited column sits out the turn that was drawn."""
    made, owners = (
        AuditPlan(every=1, extra=2, shifts=tuple(range(1, len(shares)))),
        Owners(dp=len(shares), shares=shares),
    )
    one = audit_at(made, step, seed=1, owners=owners, micro_batches=len(shares) + more)
    assert one is not None
    for column in range(len(shares)):
        replayed = one.replays(column, owners, len(shares) + more)
        assert all(0 <= leaf < len(shares) + more for leaf in replayed)
        audited = (column + one.shift) % len(shares)
        assert {owners.owner(leaf).column for leaf in replayed} == {audited} != {column}
        assert replayed == one.audited(audited, owners, len(shares) + more)


def test_over_time_every_column_is_audited_by_every_other() -> None:
    """Two that agree on a wrong result by chance do not stay a pair."""
    made = AuditPlan(every=5, extra=1, shifts=(1, 2, 3))
    pairs: Counter[tuple[int, int]] = Counter()
    for step in range(1000):
        one = audit_at(made, step, seed=7, owners=Owners(dp=4), micro_batches=16)
        if one is not None:
            pairs.update((column, (column + one.shift) % 4) for column in range(4))
    assert set(pairs) == {(a, b) for a in range(4) for b in range(4) if a != b}
    assert max(pairs.values()) < 2 * min(pairs.values())


def test_every_round_is_replayed_sooner_or_later() -> None:
    """A fault in one round only is no place to hide."""
    made = AuditPlan(every=2, extra=1, shifts=(1,))
    audits = [audit_at(made, step, seed=3, owners=Owners(dp=2), micro_batches=8) for step in range(200)]
    assert {round_ for one in audits if one is not None for round_ in one.turns} == {0, 1, 2, 3}


def test_a_change_of_layout_changes_no_other_layouts_audits() -> None:
    """What is audited follows from seed, step and layout alone: a node that has just joined knows it too."""
    made = AuditPlan(every=10, extra=1, shifts=(1, 2))
    first = [audit_at(made, step, seed=5, owners=Owners(dp=3), micro_batches=12) for step in range(50)]
    assert first == [audit_at(made, step, seed=5, owners=Owners(dp=3), micro_batches=12) for step in range(50)]


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_zero_does_not_matter(zero: int) -> None:
    """An audit is a round like any other."""
    layout = Layout(pp=2, dp=2, zero=zero)
    assert extra_rounds(layout, blocks=4, counts=[4, 8]) == 1


@pytest.mark.parametrize(("dp", "leaf", "micro_batches"), [(2, 2, 8), (3, 2, 14), (2, 3, 6), (4, 1, 6)])
def test_whole_leaves_are_replayed(dp: int, leaf: int, micro_batches: int) -> None:
    """Micro-batches that are summed before they are sent are replayed together, by another column than their own."""
    layout = Layout(pp=1, dp=dp)
    made = plan(layout, budget=1.0, blocks=4, counts=[micro_batches], nodes=nodes_of(layout, 1), leaf=leaf)
    assert (made.extra % leaf, made.hearing % leaf, made.leaf) == (0, 0, leaf)
    for step, column in itertools.product(range(20), range(dp)):
        numbers = replayed(made, step, seed=2, owners=Owners(dp=dp), column=column, micro_batches=micro_batches)
        likes = [number - micro_batches * PASSED_OVER for number in numbers]
        assert len(likes) == made.extra
        for first in range(0, len(likes), leaf):
            run = likes[first : first + leaf]
            assert run == list(range(run[0], run[0] + leaf))
            assert run[0] % leaf == 0
            assert 0 <= run[-1] < micro_batches
            assert run[0] // leaf % dp != column


def test_columns_without_a_micro_batch_of_their_own_audit_nobody() -> None:
    """Which is said, rather than that a filler stands for what counts."""
    layout = Layout(pp=1, dp=4)
    made = plan(layout, budget=1.0, blocks=4, counts=[3], nodes=nodes_of(layout, 1))
    assert made.every == 0
    assert "dp=4" in made.why


def test_what_audits_see_is_told_in_numbers() -> None:
    """Of 16 micro-batches on 4 columns 4 are run twice in one step of 25; over two nodes if each has two of them."""
    layout = Layout(pp=1, dp=4)
    for slots, nodes in ((1, 4), (2, 2), (4, 1)):
        made = plan(layout, budget=0.01, blocks=8, counts=[8, 16], nodes=nodes_of(layout, slots))
        seen = coverage(made, layout, counts=[8, 16], nodes=nodes_of(layout, slots))
        assert (seen.every, seen.pieces, seen.nodes, seen.off) == (50, 0.25, nodes, "")
    off = plan(layout, budget=0.0, blocks=8, counts=[16], nodes=nodes_of(layout, 1))
    assert coverage(off, layout, counts=[16], nodes=nodes_of(layout, 1)).off == off.why


@pytest.mark.parametrize("budget", [5e-324, 1e-12, 1e-4, 1.0])
def test_any_budget_gives_a_plan_of_whole_steps(budget: float) -> None:
    """One that is next to nothing audits next to never; all of it audits each step in which there is a round for it."""
    layout = Layout(pp=1, dp=2)
    made = plan(layout, budget=budget, blocks=4, counts=[8], nodes=[0, 1])
    assert made.every >= 1
    assert made.every == 1 or made.extra / (made.every * 4) <= budget or made.every == RAREST
    assert (audit_at(made, 0, seed=1, owners=Owners(dp=2), micro_batches=8) is not None) >= (budget == 1.0)
    assert "micro-batches leave some" in plan(layout, budget=budget, blocks=4, counts=[1], nodes=[0, 1]).why

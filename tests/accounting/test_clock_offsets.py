"""Nodes whose wall clocks differ."""

from __future__ import annotations

import pytest

from tests.accounting.written import TWO, Written, spent, started


def run_with(ahead: float) -> Written:
    """Return a run with a death, in which the clock of b is ahead."""
    written = started(["a", "b", "c"])
    at = written.steps(1, 5, 3, 1, "a")
    for number in range(1, 6):
        for node in ("a", "b", "c"):
            written.say(node, 3.01 + number, "snapshot.held", generation=1, step=number)
    for node in TWO:
        written.say(node, at + 2, "peer.lost", peer="c", evidence="silent")
    written.seal(2, at + 3, "death", TWO)
    written.begin(2, at + 3, TWO, step=5)
    at = written.steps(6, 7, at + 5, 2, "a")
    written.end(2, at, TWO)
    for line in written.lines["b"]:
        line["at"] += ahead
    return written


@pytest.mark.parametrize("ahead", [3600.0, -0.75, 86400.0 * 365])
def test_an_account_does_not_depend_on_how_clocks_are_set(ahead: float) -> None:
    """The offset comes from moments that several nodes wrote down."""
    _, _, level = run_with(0.0).read()
    _, _, account = run_with(ahead).read()
    assert [clock.ahead for clock in account.clocks] == [0, round(ahead * 1e6), 0]
    assert spent(account, "b") == spent(level, "b")
    assert account.generations == level.generations


def test_a_clock_that_is_set_back_meanwhile_loses_no_time() -> None:
    """The lines of a file are in the order in which they were written."""
    _, _, level = run_with(0.0).read()
    written = run_with(0.0)
    written.sort()
    for node in ("a", "b"):
        lines = written.lines[node]
        for line in lines[len(lines) // 2 :]:
            line["at"] -= 3600
    _, _, account = written.read(sort=False)
    assert any("clock of a, b was set back" in remark for remark in account.remarks)
    assert account.microseconds == pytest.approx(level.microseconds, abs=3_000_000)
    assert sum(account.by_category.values()) == pytest.approx(sum(level.by_category.values()), abs=6_000_000)


def test_delays_are_not_taken_for_clocks() -> None:
    """What a node writes some tens of milliseconds later than others was late."""
    _, _, account = run_with(0.04).read()
    assert [clock.ahead for clock in account.clocks] == [0, 0, 0]


def test_a_newcomer_that_hears_late_of_a_generation_without_it_has_no_other_clock() -> None:
    """It writes down the present generation when it joins."""
    written = started(TWO)
    written.steps(1, 50, 3, 1, "a")
    written.say("c", 40, "member.joined", incarnation="1")
    written.say("c", 40, "generation.sealed", number=1, cause="start", nodes=TWO, spares=[], leader="a")
    _, _, account = written.read()
    assert [(clock.node, clock.ahead) for clock in account.clocks] == [("a", 0), ("b", 0), ("c", 0)]
    assert any("clocks of c could not be compared" in remark for remark in account.remarks)

"""The ledger, the nodes of a trace and the costs, by themselves."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chaos.goodput.costs import RecoveryCosts, read_costs, written
from chaos.goodput.ledger import Ledger, Place, Spent
from chaos.goodput.lives import crowd
from chaos.simulation.trace import Held
from elastic3d.errors import UsageError

DOINGS = st.lists(
    st.tuples(
        st.sampled_from(["arrive", "depart", "active", "spare", "begin", "step", "pause", "back"]), st.integers(0, 5)
    ),
    max_size=60,
)


@given(doings=DOINGS)
def test_whatever_happens_categories_add_up(doings: list[tuple[str, int]]) -> None:
    """Each second of each held node is in one category, in any order of events."""
    ledger, there, held, now = Ledger("any", 1), set[int](), 0.0, 0.0
    for what, which in doings:
        now += 1.0 + which
        held += len(there) * (1.0 + which)
        match what:
            case "arrive" if which not in there:
                there.add(which)
                ledger.arrive(which, now)
            case "depart":
                there.discard(which)
                ledger.depart(which, now)
            case "active":
                ledger.place(which, Place.ACTIVE, now)
            case "spare":
                ledger.place_all(there - {which}, {which}, now)
            case "begin":
                ledger.begin(now)
            case "step" if ledger.training:
                ledger.stepped(now, 0.25)
            case "pause":
                ledger.pause(Spent.REPEATED, Spent.RECOVERY, now)
            case "back":
                ledger.go_on_from(min(which, ledger.steps), now)
    account = ledger.close(now)
    assert sum(account.node_seconds.values()) == pytest.approx(held)
    assert account.held == pytest.approx(held)


def test_steps_that_are_found_again_count_again() -> None:
    """Those of which a node that comes back has the state; what was made in their place stays lost or counts once."""
    ledger = Ledger("any", 1)
    ledger.arrive(0, 0.0)
    ledger.place(0, Place.ACTIVE, 0.0)
    ledger.begin(0.0)
    for now in (10.0, 20.0, 30.0, 40.0):
        ledger.stepped(now)
    ledger.go_on_from(1, 40.0)
    ledger.stepped(42.0)
    ledger.go_on_from(4, 42.0)
    assert ledger.steps == 4
    account = ledger.close(42.0)
    assert account.node_seconds[Spent.USEFUL] == pytest.approx(10 + 2 + 10 + 10)
    assert account.node_seconds[Spent.REPEATED] == pytest.approx(10)
    assert sum(account.node_seconds.values()) == pytest.approx(account.held)


def test_too_few_nodes_wait() -> None:
    """Time in which no layout fits what is held is waiting for all of them, and none in which training was possible."""
    ledger = Ledger("any", 2)
    ledger.arrive(1, 0.0)
    ledger.arrive(2, 100.0)
    ledger.place_all({1, 2}, (), 110.0)
    ledger.begin(110.0)
    ledger.stepped(130.0)
    assert ledger.depart(2, 140.0)
    account = ledger.close(200.0)
    spent = {spent: seconds for spent, seconds in account.node_seconds.items() if seconds}
    assert spent == {Spent.WAITING: 160.0, Spent.JOINING: 20.0, Spent.USEFUL: 40.0, Spent.REPEATED: 20.0}
    assert (account.possible, account.training, account.effective_training_time) == (40.0, 20.0, 0.5)


@given(counts=st.lists(st.integers(0, 9), min_size=1, max_size=12), seed=st.integers(0, 99))
def test_the_nodes_of_a_trace_are_as_many_as_it_says(counts: list[int], seed: int) -> None:
    """At all times; and the same seed draws the same nodes."""
    trace = [Held(at=10.0 * place, nodes=nodes) for place, nodes in enumerate(counts)]
    made = crowd(trace, 10.0 * len(counts), seed=seed, announced=0.5)
    assert made == crowd(trace, 10.0 * len(counts), seed=seed, announced=0.5)
    for place, nodes in enumerate(counts):
        at = 10.0 * place + 5.0
        assert sum(life.at <= at < life.until for life in made.lives) == nodes
        assert next(held for since, until, held in made.counts() if since <= at < until) == nodes


def test_costs_are_read_back_as_they_are_written(tmp_path: Path) -> None:
    """With the source of each beside it; a file may have only some, and an option goes before it."""
    path = tmp_path / "costs.toml"
    path.write_text(written(RecoveryCosts(node_start=33.0)))
    assert read_costs(path) == RecoveryCosts(node_start=33.0)
    path.write_text("load = 2\n")
    assert read_costs(path, ["load=3", "build=1"]) == RecoveryCosts(load=3.0, build=1.0)
    assert written(RecoveryCosts()).count("measured") >= 10


@pytest.mark.parametrize(
    ("text", "given", "message"),
    [
        ("", ["lod=3"], "there is no cost 'lod'; there are node_start"),
        ("", ["load=x"], "give NAME=NUMBER"),
        ("", ["load=-1"], "load is -1; give seconds, or a share, 0 or more"),
        ("", ["peer_bandwidth=0"], "give bytes per second, more than 0"),
        ("load = 'long'", [], "load is 'long'; give a number"),
        ("load", [], "it is no TOML"),
        (None, [], "it cannot be read"),
    ],
)
def test_costs_that_are_none_are_refused(text: str | None, given: list[str], message: str, tmp_path: Path) -> None:
    """With what to give instead."""
    path = tmp_path / "costs.toml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UsageError, match=message):
        read_costs(path, given)


def test_every_cost_says_where_it_comes_from() -> None:
    """Measured, or openly not."""
    for line in written(RecoveryCosts()).splitlines()[1:]:
        assert not line.startswith("#") or "measured" in line or "assumed" in line, line
    assert math.isfinite(RecoveryCosts().load)

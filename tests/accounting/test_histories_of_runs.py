"""Runs that are made up event by event: what each second of their nodes went to."""

from __future__ import annotations

import pytest

from tests.accounting.written import STALL, TWO, Written, cost, spent, started


def test_an_undisturbed_run_is_useful_but_for_its_beginning_and_its_end() -> None:
    """Its first step takes a second longer than others: that is compiled, and so prepared."""
    written = started(TWO)
    written.step(1, 5, 1, "a", seconds=2.0)
    last = written.steps(2, 4, 5, 1, "a")
    written.end(1, last + 1, TWO)
    _, _, account = written.read()
    assert spent(account, "b") == {
        "joining": 1.0,
        "preparing": 2.0,
        "forming": 0.5,
        "restoring": 0.5,
        "useful": 4.0,
        "saving": 1.5,
    }
    assert account.steps == 4
    assert account.goodput == pytest.approx(4 / 9.5)
    assert account.effective_training_time_ratio == pytest.approx(4 / 9.5)
    assert account.remarks == ()


def test_a_death_costs_the_step_that_it_cut_short_and_all_until_the_next_one() -> None:
    """The dead node's last sign of life divides what was computed from what was waited for."""
    written = started(["a", "b", "c"])
    at = written.steps(1, 3, 3, 1, "a")
    written.say("c", at + 0.25, "snapshot.held", generation=1, step=3)
    for node in TWO:
        written.say(node, at + 2, "peer.lost", peer="c", evidence="silent")
    written.seal(2, at + 3, "death", TWO)
    written.begin(2, at + 3, TWO, step=3)
    at = written.steps(4, 5, at + 5, 2, "a")
    written.end(2, at, TWO)
    _, _, account = written.read()
    assert cost(account, 2) == {
        "repeated": 0.75,
        "noticing": 3.5,
        "forming": 3.0,
        "preparing": 2.0,
        "restoring": 1.0,
    }
    assert account.generations[1].gone == ("c",)
    assert spent(account, "c") == {
        "joining": 1.0,
        "preparing": 1.0,
        "forming": 0.5,
        "restoring": 0.5,
        "useful": 3.0,
        "repeated": 0.25,
    }


def test_steps_behind_which_a_generation_goes_back_are_repeated_on_its_account() -> None:
    """Those that were made first are the lost ones; those that were made again count."""
    written = started(TWO)
    at = written.steps(1, 5, 3, 1, "a")
    written.say("b", at, "trainer.exited", generation=1, kind="crash", step=5)
    written.seal(2, at, "failure", TWO)
    written.begin(2, at, TWO, step=2, source="store")
    at = written.steps(3, 6, at + 2, 2, "a")
    written.end(2, at, TWO)
    _, _, account = written.read()
    assert account.steps == 6
    assert account.generations[1].steps_repeated == 3
    assert cost(account, 2)["repeated"] == 6.0
    assert spent(account, "b")["useful"] == 6.0


def test_the_first_generation_to_go_back_is_charged() -> None:
    """A later one that goes back further takes only what the first has left."""
    written = started(TWO)
    at = written.steps(1, 6, 3, 1, "a")
    for number, base in ((2, 4), (3, 2)):
        written.say("b", at, "trainer.exited", generation=number - 1, kind="crash", step=base)
        written.seal(number, at, "failure", TWO)
        written.begin(number, at, TWO, step=base)
        at = written.steps(base + 1, base + 1, at + 2, number, "a")
    _, _, account = written.read()
    assert [one.steps_repeated for one in account.generations] == [0, 2, 3]


def test_a_join_costs_nothing_while_the_others_still_train() -> None:
    """What is prepared beside steps is not charged: the pause is what lies between two steps."""
    written = started(TWO)
    written.say("c", 3.5, "node.started")
    written.say("c", 4, "member.joined", incarnation="1")
    at = written.steps(1, 4, 3, 1, "a")
    three = [*TWO, "c"]
    written.begin(2, at - 1.25, three, step=4)
    for node in TWO:
        written.say(node, at + 0.125, "trainer.exited", generation=1, kind="left", step=4)
    written.seal(2, at + 0.125, "join", three)
    at = written.steps(5, 6, at + 0.75, 2, "a")
    written.end(2, at, three)
    _, _, account = written.read()
    assert account.generations[1].come == ("c",)
    assert spent(account, "a")["useful"] == 6.0
    assert spent(account, "a")["restoring"] == 1.0
    assert spent(account, "c")["joining"] == pytest.approx(3.625)
    assert cost(account, 2) == {"forming": 0.625, "restoring": 1.5}


def test_waits_for_data_and_snapshots_are_cut_out_of_steps() -> None:
    """As far as rank 0 has measured them, and never more than the step took."""
    written = started(TWO)
    written.step(1, 4, 1, "a")
    written.step(2, 5, 1, "a", data=0.25, copy=0.125)
    written.step(3, 6, 1, "a", data=7.0, copy=7.0)
    _, _, account = written.read()
    mine = spent(account, "b" if "data" in spent(account, "b") else "a")
    assert (mine["data"], mine.get("saving", 0.0)) == (1.25, 0.125)


def test_a_slow_node_is_waited_for_by_all_others() -> None:
    """From the step on that shows it until it is well again; itself it computes."""
    written = started(TWO)
    at = written.steps(1, 4, 3, 1, "a")
    about = {"nodes": ["b"], "ranks": [1], "kind": "compute", "cost": 0.25, "generation": 1}
    written.say("a", at, "node.slow", **about, since=2, step=4)
    at = written.steps(5, 6, at, 1, "a")
    written.say("a", at, "node.well", **about, since=2, step=6)
    at = written.steps(7, 8, at, 1, "a")
    written.end(1, at, TWO)
    _, _, account = written.read()
    assert spent(account, "a")["slow"] == 1.0
    assert "slow" not in spent(account, "b")
    assert spent(account, "b")["useful"] == 8.0


def test_samples_that_come_late_are_waited_for_by_all() -> None:
    """Also where another rank than rank 0 waits for them."""
    written = started(TWO)
    about = {"nodes": ["b"], "ranks": [1], "kind": "data", "cost": 0.5, "generation": 1}
    at = written.steps(1, 2, 3, 1, "a")
    written.say("a", at, "node.slow", **about, since=1, step=2)
    written.end(1, at, TWO)
    _, _, account = written.read()
    assert (spent(account, "a")["data"], spent(account, "b")["data"]) == (0.5, 0.5)


def test_a_step_in_which_somebody_stood_still_is_useful_for_as_long_as_others() -> None:
    """The rest was waited for, as it says itself to its keeper."""
    written = started(TWO)
    at = written.steps(1, 3, 3, 1, "a")
    written.silent("b", at + 4, 1, STALL)
    written.step(4, at + 10, 1, "a", seconds=10.0)
    at = written.steps(5, 5, at + 10, 1, "a")
    written.end(1, at, TWO)
    _, _, account = written.read()
    assert spent(account, "a")["slow"] == 9.0
    assert spent(account, "a")["useful"] == 5.0


def test_spares_leavers_and_nodes_that_wait_for_others_are_told_apart() -> None:
    """By the generations that they are in, and by what was asked of them."""
    written = started(TWO)
    written.say("s", 0, "node.started")
    written.say("s", 0, "member.joined", incarnation="1")
    written.seal(1, 1, "start", TWO, ["s"])
    at = written.steps(1, 2, 3, 1, "a")
    written.say("b", at, "node.draining", seconds=30, detail="an order")
    at = written.steps(3, 3, at, 1, "a")
    for node in TWO:
        written.say(node, at, "trainer.exited", generation=1, kind="left", step=3)
    written.seal(2, at, "drain", ["a", "s"])
    written.say("b", at + 3, "job.ended", kind="done")
    written.begin(2, at, ["a", "s"], step=3)
    at = written.steps(4, 4, at + 2, 2, "a")
    written.say("s", at + 1, "peer.lost", peer="a", evidence="silent")
    written.say("s", at + 2, "nodes.awaited", count=2, detail="one is there")
    written.say("s", at + 6, "job.ended", kind="error")
    _, _, account = written.read()
    assert spent(account, "s")["spare"] == 5.0
    assert spent(account, "b")["leaving"] == 3.0
    assert spent(account, "b")["useful"] == 3.0
    assert spent(account, "s")["waiting"] == 4.0


def test_a_node_that_comes_back_was_away_in_between_and_is_new() -> None:
    """Though the generation that it died in may still be the newest one. Its absence lowers no share."""
    written = started(TWO)
    at = written.steps(1, 2, 3, 1, "a")
    written.say("b", at, "snapshot.held", generation=1, step=2)
    written.say("b", at + 5, "node.started")
    written.say("b", at + 6, "member.joined", incarnation="2")
    written.say("b", at + 6, "generation.sealed", number=1, cause="start", nodes=TWO, spares=[], leader="a")
    written.say("a", at + 7, "peer.lost", peer="b", evidence="silent")
    written.seal(2, at + 8, "death", TWO)
    written.say("b", at + 9, "job.ended", kind="error")
    _, _, account = written.read()
    mine = spent(account, "b")
    assert mine["away"] == 5.0
    assert mine["joining"] == 1.0 + 3.0
    assert account.held == sum(one.microseconds for one in account.nodes) - 5_000_000


def test_a_run_that_is_started_again_repeats_what_its_first_start_had_not_saved() -> None:
    """Though generations are counted from 1 again, and one of its nodes is another one."""
    written = started(TWO)
    at = written.steps(1, 5, 3, 1, "a")
    for node in TWO:
        written.say(node, at, "trainer.exited", generation=1, kind="error", step=5)
        written.say(node, at, "job.ended", kind="error")
    begun = at + 100
    for node in ("a", "c"):
        written.say(node, begun, "node.started")
        written.say(node, begun, "member.joined", incarnation="2")
    written.seal(1, begun + 1, "start", ["a", "c"])
    written.begin(1, begun + 1, ["a", "c"], step=3, source="store")
    at = written.steps(4, 6, begun + 3, 1, "c")
    written.end(1, at, ["a", "c"])
    run, _, account = written.read()
    assert [(one.number, one.start, one.steps_repeated) for one in account.generations] == [(1, 0, 0), (1, 1, 2)]
    assert account.steps == 6
    assert spent(account, "a")["away"] == 100.0
    assert spent(account, "c")["useful"] == 3.0
    assert run.nodes == ("a", "b", "c")


def test_a_lost_file_of_the_node_that_wrote_the_steps_is_made_up_for_by_snapshots() -> None:
    """The folder was on the machine that is gone: others held the snapshots of the same steps."""
    written = started(["a", "b", "c"])
    for number in range(1, 5):
        for node in ("b", "c"):
            written.say(node, 3 + number, "snapshot.held", generation=1, step=number)
    for node in ("b", "c"):
        written.say(node, 9, "peer.lost", peer="a", evidence="silent")
    written.seal(2, 9, "death", ["b", "c"])
    del written.lines["a"]
    _, _, account = written.read()
    assert account.generations[0].inferred
    assert spent(account, "b")["useful"] == 3.0
    assert any("generation 1 had a" in remark for remark in account.remarks)


def test_a_file_that_lost_its_beginning_is_accounted_for_from_what_is_left() -> None:
    """Nobody wrote down how the generation was sealed: what came before its steps is unknown."""
    written = started(TWO)
    at = written.steps(1, 9, 3, 1, "a")
    written.end(1, at, TWO)
    for node, lines in written.lines.items():
        written.lines[node] = [line for line in lines if line["event"] in ("step.committed", "trainer.exited")][-4:]
    _, _, account = written.read()
    assert spent(account, "a") == {"useful": 2.0}
    assert len(account.remarks) == 3


def test_nothing_is_divided_by_a_run_of_no_length() -> None:
    """One event is a run."""
    written = Written()
    written.say("a", 0, "node.started")
    _, _, account = written.read()
    assert (account.microseconds, account.goodput, account.effective_training_time_ratio) == (0, 0.0, 0.0)

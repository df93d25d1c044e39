"""A job's picture is a pure function of its events."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chaos.history.follow import Follower, Injection, Ledger, ledger, parse, picture
from elastic3d.log import EventLog
from tests.chaos.made_up_events import (
    BATCH,
    a_death_and_a_join,
    a_step_that_nobody_told_of,
    event,
    restored,
    sealed,
    step,
)


def test_generations_show_what_each_change_cost() -> None:
    """Cause, nodes, repeated steps, source of the state, seconds since the event, and the pause are all there."""
    kills = [Injection(kind="kill", node="node1", at=12.0), Injection(kind="join", node="node4", at=13.45)]
    first, second, third = picture(a_death_and_a_join(), kills, started_at=0.0).generations
    assert (first.cause, first.steps_repeated, first.restored_from, first.pause) == ("start", 0, "none", None)
    assert first.seconds_to_first_step == pytest.approx(11.0)
    assert second.nodes == ("node0", "node2", "node3")
    assert (second.first_step, second.steps_repeated, second.restored_from) == (3, 1, "memory")
    assert second.seconds_to_first_step == pytest.approx(1.0)
    assert second.pause == pytest.approx(0.8)
    assert (third.first_step, third.last_step, third.steps_repeated) == (5, 6, 0)
    assert third.seconds_to_first_step == pytest.approx(14.3 - 13.45)
    assert third.layout == {"pp": 2, "dp": 2, "tp": 1, "zero": 3}


def test_without_injections_a_change_counts_from_its_detection() -> None:
    """A death that nobody injected begins when a peer noticed it."""
    second = picture(a_death_and_a_join()).generations[1]
    assert second.seconds_to_first_step == pytest.approx(13.0 - 12.05)


def test_a_repeated_step_replaces_the_earlier_one() -> None:
    """The history that counts has each step once, as the later generation made it."""
    seen = picture(a_death_and_a_join())
    assert [(s.number, s.generation) for s in seen.steps] == [(1, 1), (2, 1), (3, 2), (4, 2), (5, 3), (6, 3)]
    assert seen.conflicts == ()
    assert len(seen.losses) == 6


def test_steps_after_the_restored_one_do_not_count_until_repeated() -> None:
    """Lost work leaves the history even before it is repeated."""
    events = [sealed(1, 0.0, "start", ["a", "b"]), *(step(n, float(n), 1) for n in range(1, 9))]
    events += [sealed(2, 9.0, "death", ["a"]), restored(2, 9.1, "store", 4), step(5, 10.0, 2)]
    seen = picture(events)
    assert seen.step == 5
    assert seen.generations[1].steps_repeated == 4
    assert seen.generations[1].restored_from == "store"


def test_a_repeated_step_with_another_loss_is_a_conflict() -> None:
    """The same bits mean that a repeated step repeats its loss."""
    events = [e for e in a_death_and_a_join() if not (e.generation == 2 and e.fields.get("step") == 3)]
    events.append(step(3, 13.0, 2, loss=4.699999))
    assert picture(events).conflicts == (3,)


def test_a_step_of_a_distrusted_state_may_be_done_again_with_other_bits() -> None:
    """Whoever made it was convicted; a step from before that still has to be the same."""
    events = [e for e in a_death_and_a_join() if not (e.generation == 2 and e.fields.get("step") == 3)]
    events.append(step(3, 13.0, 2, loss=4.699999))
    for last, conflicts in ((2, ()), (3, (3,))):
        told = event("state.distrusted", 12.5, generation=2, step=last, before=2, detail="node1 was convicted")
        assert picture([*events, told]).conflicts == conflicts


def test_a_step_that_is_left_out_when_it_is_repeated_is_none() -> None:
    """The run went back behind it, and does not make it again."""
    events = [e for e in a_death_and_a_join() if not (e.generation == 2 and e.fields.get("step") == 3)]
    left_out = step(3, 13.0, 2, loss=math.nan)
    events.append(replace(left_out, fields={**left_out.fields, "sample_sum": 0, "excluded": [[16, 24]]}))
    seen = picture(events)
    assert seen.conflicts == ()
    assert seen.steps[2].excluded == ((16, 24),)


def test_a_generation_without_steps_shows_no_time() -> None:
    """A second death during a recovery leaves such a generation."""
    events = [sealed(1, 0.0, "start", ["a", "b", "c"]), step(1, 1.0, 1), sealed(2, 2.0, "death", ["a", "b"])]
    events += [sealed(3, 2.5, "death", ["a"]), step(2, 4.0, 3)]
    kills = [Injection(kind="kill", node="c", at=1.9), Injection(kind="kill", node="b", at=2.1)]
    _, second, third = picture(events, kills).generations
    assert (second.first_step, second.seconds_to_first_step) == (None, None)
    assert third.seconds_to_first_step == pytest.approx(1.9)


@given(st.randoms(use_true_random=False))
def test_the_order_of_lines_in_files_does_not_matter(shuffler: random.Random) -> None:
    """Each keeper writes its own file; the picture is made of the events by time."""
    events = a_death_and_a_join()
    expected = picture(events)
    shuffler.shuffle(events)
    assert picture(events) == expected


def test_an_error_in_the_users_code_is_shown() -> None:
    """The trainer's own error reaches the picture."""
    failed = event("trainer.exited", 3.0, pid=1, kind="error", step=2, error="rank 0: ValueError: bad\n")
    assert picture([failed]).errors == ("rank 0: ValueError: bad\n",)


@pytest.mark.parametrize("kind", ["keepers killed", "join-other", "unkillable"])
def test_a_node_that_ends_by_what_was_done_to_it_is_no_mistake_of_the_script(kind: str) -> None:
    """It says why it ends; another node that says so is one."""
    ended = [event("job.ended", 2.0, node=node, kind="error", error=f"{node} is lost") for node in ("node0", "node1")]
    done = Injection(kind=kind, node="node1", at=1.0)
    assert picture(ended, [done]).errors == ("node0 is lost",)


def test_a_step_that_nobody_told_of_counts_by_the_state_that_has_it() -> None:
    """Where the steps on both sides of it are known, with the samples between them."""
    events = a_step_that_nobody_told_of(4.8)
    (second,) = (one for one in picture(events).steps if one.number == 2)
    assert (second.loss, second.samples, second.sample_sum) == ((4.8).hex(), (BATCH, 2 * BATCH), None)
    assert ledger(picture(events).steps, 6 * BATCH) == Ledger(consumed=6 * BATCH, repeated=0, missing=0)
    without_first = [one for one in events if one.fields.get("step") != 1]
    assert [one.number for one in picture(without_first).steps] == [3, 4, 5, 6]
    (begun,) = (one for one in events if one.name == "state.restored")
    elsewhere = [replace(one, fields={**one.fields, "step": 1}) if one is begun else one for one in events]
    assert [one.number for one in picture(elsewhere).steps] == [1, 3, 4, 5, 6]


def test_the_ledger_counts_each_sample_once() -> None:
    """A complete history consumes every position once."""
    assert ledger(picture(a_death_and_a_join()).steps, 6 * BATCH) == Ledger(consumed=6 * BATCH, repeated=0, missing=0)


def test_the_ledger_finds_gaps_overlaps_and_a_short_end() -> None:
    """Samples that were skipped, consumed twice or never reached are counted."""
    steps = picture(a_death_and_a_join()).steps
    without_second = [s for s in steps if s.number != 2]
    assert ledger(without_second) == Ledger(consumed=5 * BATCH, repeated=0, missing=BATCH)
    third_twice = [*steps, replace(steps[2], number=99)]
    assert ledger(third_twice).repeated == BATCH
    assert ledger(steps, 7 * BATCH) == Ledger(consumed=6 * BATCH, repeated=0, missing=BATCH)


def test_a_follower_reads_each_whole_line_once(tmp_path: Path) -> None:
    """An incomplete line is left for later, a file may appear late, and a line that is no event is skipped."""
    follower = Follower(tmp_path)
    assert follower.poll() == []
    with EventLog(tmp_path / "n0-0.jsonl", node="n0", slot=0) as log:
        log.emit("member.joined", incarnation="a")
        assert log.flush(30)
        assert [e.name for e in follower.poll()] == ["member.joined"]
        with (tmp_path / "n0-0.jsonl").open("a") as file:
            file.write('{"event": "snapshot.he')
        assert follower.poll() == []
        with (tmp_path / "n0-0.jsonl").open("a") as file:
            file.write('ld", "at": 5.0, "step": 3}\nnonsense\n')
        (held,) = follower.poll()
        assert (held.name, held.fields["step"]) == ("snapshot.held", 3)
    assert parse("[1, 2]") is None

"""A history is judged by its own events and by an undisturbed run."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from chaos.faults.code import Deadlock, Skip
from chaos.faults.fault import Fault
from chaos.faults.moment import When
from chaos.faults.store import StoreFlips
from chaos.history.claims import Commit, deposed
from chaos.history.follow import Event, Injection, picture
from chaos.judging.oracle import (
    GOES_ON,
    SAVED,
    WHOLE,
    Verdict,
    all_is_known,
    document,
    judge,
    of_one_that_was_ended,
)
from chaos.playing.outcome import Outcome
from chaos.playing.setting import Setting
from chaos.report.plot import loss_plot
from chaos.report.view import progress, summary
from chaos.schedules.scenario import parse_kill
from tests.chaos.made_up_events import BATCH, a_death_and_a_join, a_step_that_nobody_told_of, event, sealed, step
from tests.paths import ROOT


def outcome(events: list[Event], digest: str | None = "abc") -> Outcome:
    return Outcome(
        setting=Setting(steps=6, global_batch=BATCH),
        faults=(parse_kill("1@3"),),
        picture=picture(events),
        digest=digest,
        exit_codes={"node0": 0, "node1": -9, "node2": 0, "node3": 0, "node4": 0},
        killed=("node1",),
        undone=(),
        leftovers=(),
        made=((parse_kill("1@3"), 11.9),),
        hit=("node1",),
        events=tuple(events),
    )


def quiet() -> Outcome:
    events = [sealed(1, 0.0, "start", ["node0", "node1"]), *(step(n, float(n), 1) for n in range(1, 7))]
    return replace(outcome(events), faults=(), killed=(), made=(), hit=(), exit_codes={"node0": 0, "node1": 0})


def test_the_same_bits_are_recognised() -> None:
    """Same digest, same losses, same samples: every promise held."""
    verdict = judge(outcome(a_death_and_a_join()), quiet())
    assert verdict.same_bits is True
    assert verdict.broken == ()
    assert verdict.kept


def test_one_different_bit_is_a_broken_promise() -> None:
    """A digest or a loss that differs is named."""
    other = judge(outcome(a_death_and_a_join(), digest="abd"), quiet())
    assert other.same_bits is False
    assert "digest" in " ".join(other.broken)
    events = [e for e in a_death_and_a_join() if e.fields.get("step") != 6]
    changed = judge(outcome([*events, step(6, 15.0, 3, loss=1.0)]), quiet())
    assert changed.same_bits is False
    assert "loss of step 6" in " ".join(changed.broken)


def test_a_step_that_nobody_told_of_is_compared_by_what_the_state_says() -> None:
    """Its loss, and that the samples between its neighbours are those of one step."""
    right = replace(outcome(a_step_that_nobody_told_of(4.8)), faults=(), killed=(), made=(), hit=())
    assert judge(right, quiet()).same_bits is True
    wrong = replace(right, picture=picture(a_step_that_nobody_told_of(4.9)))
    assert "loss of step 2" in " ".join(judge(wrong, quiet()).broken)


def test_a_last_step_without_a_checkpoint_is_a_broken_promise() -> None:
    """With a store, the last step is always a checkpoint."""
    seen = replace(outcome(a_death_and_a_join()), store="file:///store")
    assert "last step, 6, is no checkpoint" in " ".join(judge(seen).broken)
    saved = replace(step(6, 20.0, 3), name="checkpoint.committed", fields={"step": 6, "moved": True})
    events = replace(outcome([*a_death_and_a_join(), saved]), store="file:///store")
    assert judge(events).kept


def test_same_bits_is_unknown_without_an_undisturbed_run() -> None:
    """It is None, and the other promises still count."""
    assert judge(outcome(a_death_and_a_join())).same_bits is None
    assert judge(outcome(a_death_and_a_join())).kept


def test_a_node_that_had_to_stay_out_ends_with_an_error_and_is_in_no_generation() -> None:
    """Its exit code breaks no promise; that it took part does, and so does an end as if all were well."""
    seen = replace(outcome(a_death_and_a_join()), unwanted=("node9",))
    assert judge(replace(seen, exit_codes={**seen.exit_codes, "node9": 1})).broken == ()
    well = judge(replace(seen, exit_codes={**seen.exit_codes, "node9": 0}))
    assert well.broken == ("node9, which had to stay out, ended with 0",)
    inside = judge(replace(seen, unwanted=("node0",), exit_codes={**seen.exit_codes, "node0": 1}))
    assert inside.broken == ("node0, which had to stay out, took part",)


def test_every_broken_promise_is_named() -> None:
    """Exit codes, an early end, a missing digest, leftovers, faults that never happened."""
    bad = replace(
        outcome(a_death_and_a_join()[:-1], digest=None),
        exit_codes={"node0": 1, "node1": -9},
        leftovers=("process 7: python",),
        undone=(parse_kill("2@5"),),
    )
    complaints = "\n".join(judge(bad).broken)
    for part in (
        "node0 ended with exit code 1",
        "after step 5 of 6",
        "no digest",
        "process 7",
        "kill node2@5",
        "16 sam",
    ):
        assert part in complaints


def test_a_planned_change_repeats_no_step() -> None:
    """Trainers that left at a step boundary lost nothing: a repeated step is reported, unless a loss explains it."""
    before = a_death_and_a_join()[:-2]
    left = [
        event("trainer.exited", 13.6, generation=2, node=node, pid=1, kind="left", step=4, error=None)
        for node in ("node0", "node2", "node3")
    ]
    events = [*before, *left, step(4, 14.2, 3), step(5, 14.3, 3), step(6, 14.7, 3)]
    assert [view.planned_repeats for view in picture(events).generations] == [0, 0, 1]
    assert judge(outcome(events), quiet()).broken == ("generation 3 (join) was planned, and repeated 1 step(s)",)
    for kind, repeats in (("kill", 0), ("drain", 1)):
        done = [Injection(kind=kind, node="node3", at=13.7)]
        assert picture(events, done).generations[-1].planned_repeats == repeats
    assert picture([*before, *left[1:], *events[-3:]]).generations[-1].planned_repeats == 0, "node0 did not leave"


def test_every_promise_says_where_it_stands() -> None:
    """What is promised, by a page that there is, and what was seen; what nobody can tell is not called held."""
    promises = judge(outcome(a_death_and_a_join())).promises
    assert all((ROOT / "docs" / promise.page).exists() and promise.seen for promise in promises)
    assert {promise.says: promise.held for promise in promises if not promise.held} == {
        "what has to end by a fault ends, by an error that says why": None,
        "the last step is saved": None,
        "every checkpoint that was committed can be restored": None,
        "nobody is named as being at fault to whom nothing was done": None,
        "a node is taken for dead only where something was done that may end it": None,
        "a generation ends only where something was done that may end it": None,
        "only steps since the newest snapshot are made again": None,
        "every fault is noticed by what the catalogue names": None,
        "whatever happens, the bits are those of a run that nothing happens to": None,
    }
    broken = judge(outcome(a_death_and_a_join(), digest="abd"), quiet())
    assert [promise.says for promise in broken.promises if promise.held is False] == [promises[-1].says]
    assert broken.broken == promises_broken(broken)


def test_nothing_is_asked_of_the_end_of_a_job_that_was_ended_for_what_broke() -> None:
    """What broke is told alone: by that it is shrunk."""
    twice = sorted([*a_death_and_a_join()[:-2], step(2, 15.0, 3, loss=1.0)], key=lambda one: one.at)
    why = "step 2 was done again with other bits"
    ended = replace(outcome(twice, digest=None), failure=why, store="file:///s")
    promises = [*of_one_that_was_ended(judge(ended).promises, why)]
    broken = [promise.broken for promise in promises if promise.held is False]
    assert (why,) in broken
    assert not {GOES_ON, WHOLE, SAVED} & {promise.says for promise in promises if promise.held is not None}


def test_a_checkpoint_of_a_job_that_was_given_up_is_not_called_whole() -> None:
    """Nobody has read it."""
    saved = [*a_death_and_a_join(), event("checkpoint.committed", 16.0, step=3, moved=True)]
    verdict = judge(replace(outcome(saved), failure="it stands"))
    (read,) = (one for one in verdict.promises if one.says == "every checkpoint that was committed can be restored")
    assert (read.held, read.seen) == (None, "of a job that was given up none of 1 was read")


@pytest.mark.parametrize(("given", "known"), [("--fault", False), ("--fault=kill:1@3", False), ("--fault-log", True)])
def test_only_the_option_of_faults_says_that_a_script_fails_by_itself(given: str, known: bool) -> None:
    """Not one of another name that begins alike, by which nothing would be judged."""
    assert all_is_known(["--steps=3", given]) is known


def test_a_checkpoint_that_cannot_be_restored_is_a_broken_promise() -> None:
    """What is wrong is said; where none was committed there is nothing to say."""
    wrong = "packs/7a: altered, byte 12"
    saved = [*a_death_and_a_join(), event("checkpoint.committed", 13.0, step=3, moved=True)]
    assert judge(outcome(sorted(saved, key=lambda one: one.at))).kept
    damaged = replace(outcome(sorted(saved, key=lambda one: one.at)), damage=(wrong,))
    (promise,) = [promise for promise in judge(damaged).promises if promise.held is False]
    assert (promise.says, promise.broken) == ("every checkpoint that was committed can be restored", (wrong,))


def promises_broken(verdict: Verdict) -> tuple[str, ...]:
    return tuple(text for promise in verdict.promises for text in promise.broken)


def naming(*nodes: str, at: float = 12.5, fault: Fault | None = None) -> Outcome:
    """Return a history in which node1 was killed at 12.0, and a rank of `nodes` was said to stand still."""
    said = event("rank.stuck", at, nodes=list(nodes), ranks=[0], fault="stopped", act=True, detail="it stands")
    events = sorted([*a_death_and_a_join(), said], key=lambda one: one.at)
    hit = (Injection(kind="kill", node="node1", at=12.0),)
    made = outcome(events)
    more = ((fault, 12.0),) if fault is not None else ()
    return replace(made, injections=hit, made=(*made.made, *more))


def test_naming_a_node_to_which_nothing_was_done_is_a_broken_promise() -> None:
    """One of the nodes that are named must have been hit by then; where a schedule does not say who was, or the
    undisturbed run names somebody too, nothing is proven."""
    wrong = "rank.stuck named node2, to which nothing had been done: it stands"
    assert judge(naming("node2"), quiet(), all_known=True).broken == (wrong,)
    assert judge(naming("node1", at=5.0), quiet(), all_known=True).broken == (wrong.replace("node2", "node1"),)
    for kept in (naming("node1"), naming("node2", "node1"), naming()):
        assert judge(kept, quiet(), all_known=True).kept
    assert judge(naming("node2"), quiet()).kept
    when = When(step=3)
    assert judge(naming("node2", fault=Skip(when=when)), quiet(), all_known=True).kept
    assert not judge(naming("node2", fault=Deadlock(when=when)), quiet(), all_known=True).kept
    usual = replace(quiet(), picture=replace(quiet().picture, accused=naming("node0").picture.accused))
    excused = judge(naming("node2"), usual, all_known=True)
    assert excused.kept
    (promise,) = (one for one in excused.promises if one.says.startswith("nobody is named"))
    assert promise.seen.endswith("; not judged, as somebody was named by it undisturbed too: rank.stuck")


def test_nobody_may_be_named_for_a_clock() -> None:
    """A node is to blame for what was done to it, but a wrong clock is no reason to blame it."""
    named = naming("node1")
    assert judge(named, quiet(), all_known=True).kept
    clock = replace(named, injections=(Injection(kind="clock", node="node1", at=12.0),))
    (broken,) = judge(clock, quiet(), all_known=True).broken
    assert broken.startswith("rank.stuck named node1")


def committed(*commits: tuple[int, str]) -> list[Commit]:
    return [
        Commit(node=node, step=step, at=float(step), generation=number) for step, (number, node) in enumerate(commits)
    ]


def test_who_was_followed_by_another_committer_commits_no_more() -> None:
    """One change within a generation may be, and so may the last leader's commits that are told late."""
    assert not deposed(committed((1, "a"), (1, "a"), (2, "a"), (2, "b"), (2, "b"), (3, "a")))
    assert not deposed(committed((1, "a"), (1, "b"), (2, "b")))
    assert not deposed(committed((1, "a"), (2, "a"), (2, "b"), (2, "a")))
    assert [one.step for one in deposed(committed((1, "a"), (1, "b"), (1, "a"), (1, "b")))] == [2]
    assert [one.step for one in deposed(committed((1, "c"), (2, "c"), (2, "a"), (2, "b"), (2, "a")))] == [4]


def test_commits_are_told_with_their_generation() -> None:
    """The newest one that was sealed by then, in whatever file; a second leader that comes back is named."""
    saved = [
        event("checkpoint.committed", at, node=node, step=step, moved=True)
        for at, node, step in ((11.9, "node3", 2), (13.1, "node0", 3), (13.2, "node2", 3), (13.3, "node0", 3))
    ]
    events = sorted([*a_death_and_a_join(), *saved], key=lambda one: one.at)
    assert [(one.node, one.generation) for one in picture(events).commits] == [
        ("node3", 1),
        ("node0", 2),
        ("node2", 2),
        ("node0", 2),
    ]
    (wrong,) = judge(outcome(events), quiet()).broken
    assert wrong == "node0 committed step 3 in generation 2 after another node had taken over"
    there = [replace(one, fields={**one.fields, "moved": one.node != "node0"}) for one in saved]
    events = sorted([*a_death_and_a_join(), *there], key=lambda one: one.at)
    assert judge(outcome(events), quiet()).kept, "who found a save committed has not committed it"


def test_a_backup_of_etcd_may_bring_back_the_former_leader() -> None:
    """The election of the second one is among what etcd has lost."""
    saved = [
        event("checkpoint.committed", at, node=node, step=step, moved=True)
        for at, node, step in ((13.1, "node0", 3), (13.2, "node2", 3), (13.3, "node0", 3))
    ]
    back = event("etcd.rolled_back", 13.25, node="node1", revision=7)
    events = sorted([*a_death_and_a_join(), *saved, back], key=lambda one: one.at)
    assert judge(outcome(events), quiet()).kept
    early = replace(back, at=13.15)
    events = sorted([*a_death_and_a_join(), *saved, early], key=lambda one: one.at)
    assert judge(outcome(events), quiet()).kept


def test_the_json_document_has_the_documented_fields() -> None:
    """A program can read what --json prints and needs nothing else."""
    seen = outcome(a_death_and_a_join())
    data = json.loads(json.dumps(document(seen, judge(seen, quiet()))))
    assert set(data) == {"digest", "losses", "generations", "samples", "same_bits", "leftovers"}
    assert [float.fromhex(loss) for loss in data["losses"]] == [4.9, 4.8, 4.7, 4.6, 4.5, 4.4]
    assert data["samples"] == {"consumed": 96, "repeated": 0, "missing": 0}
    second = data["generations"][1]
    assert set(second) == {
        *("number", "cause", "nodes", "layout", "first_step", "steps_repeated", "restored_from"),
        "seconds_to_first_step",
    }
    assert second["layout"] == {"pp": 1, "dp": 3, "cp": 1, "tp": 1, "zero": 3}


def test_the_text_output_names_the_nodes_and_the_verdict() -> None:
    """The map of the mesh, the table of generations, the verdict and the plot all come from the same picture."""
    seen = outcome(a_death_and_a_join())
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(progress(seen.picture, seen.setting, "job"))
    console.print(summary(seen, judge(seen, quiet())))
    text = console.export_text()
    for part in ("pp 1", "dp 1", "node4", "death", "memory", "same bits", "96 consumed once"):
        assert part in text
    plot = loss_plot(seen.picture, quiet().picture)
    assert plot.startswith("<svg")
    assert plot.count("<polyline") == 2
    assert "3: join" in plot


def test_a_fault_of_the_store_that_no_request_met_is_named() -> None:
    """Nothing came of it: whoever reads that all held sees by what it was not tried."""
    flips = StoreFlips(when=When(step=3))
    made = replace(outcome(a_death_and_a_join()), faults=(parse_kill("1@3"), flips), unmet=(flips,))
    (promise,) = (one for one in judge(made).promises if one.says == "every fault of the schedule comes to pass")
    assert (promise.held, promise.seen) == (True, f"1 of 2; no request met {flips}")

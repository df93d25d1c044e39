"""What a node writes of its ranks that stand still."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from elastic3d.distrust import Distrust
from elastic3d.membership import events as m
from elastic3d.membership.stalls import RankState, Stall
from elastic3d.port import StateRestored
from elastic3d.rollback import Rollback
from elastic3d.values import Layout
from elastic3d.worker.journal import Journal
from elastic3d.worker.processes import events as w
from tests.health.standstill import STEPS, generation, program, stalls, standstill, with_rank


def test_a_rank_recovers_by_moving_and_not_by_the_end_of_its_generation(tmp_path: Path) -> None:
    """Its stall is taken back either way."""
    layout = Layout(pp=1, dp=2)
    steps = {rank: [program(layout, rank) for _ in range(STEPS)] for rank in range(2)}
    ranks = with_rank(standstill(layout, steps, {1: 9}), 1, state=RankState.STOPPED, source="s3://bucket/a")
    first = generation(layout)
    stall: Stall = stalls(first, ranks)["n1@1"]
    journal = Journal(str(tmp_path), "run", "n1")
    for sealed in (first, replace(first, number=5)):
        journal.noted(m.GenerationPut(generation=sealed, revision=sealed.number))
        if sealed is first:
            journal.noted(m.RanksSilent(stall=stall))
            journal.noted(m.RanksMoving(key=first.key))
            journal.noted(m.RanksSilent(stall=stall))
    journal.noted(m.RanksMoving(key=first.key))
    assert journal.flush(30)
    journal.close()
    events = [json.loads(line) for line in (tmp_path / "n1-0.jsonl").read_text().splitlines()]
    assert [(event["event"], event.get("detail")) for event in events if event["event"].startswith("rank.")] == [
        ("rank.suspected", "waits for s3://bucket/a"),
        ("rank.recovered", None),
        ("rank.suspected", "waits for s3://bucket/a"),
    ]


def test_a_state_says_the_loss_of_its_last_step(tmp_path: Path) -> None:
    """Rank 0 may have ended before it told of that step; a state that has no loss says none."""
    journal = Journal(str(tmp_path), "run", "n0")
    for number, loss in ((2, (5.5).hex()), (3, "")):
        state = StateRestored(source="memory", step=6, generation=1, loss=loss)
        journal.trainer(w.Restored(slot=0, trainer=1, state=state), number, 0)
    assert journal.flush(30)
    journal.close()
    events = [json.loads(line) for line in (tmp_path / "n0-0.jsonl").read_text().splitlines()]
    assert [one.get("loss") for one in events if one["event"] == "state.restored"] == [(5.5).hex(), None]


def test_the_node_that_seals_a_generation_says_which_states_are_not_gone_on_from(tmp_path: Path) -> None:
    """Once for each rule, and nobody else does."""
    first = generation(Layout(pp=1, dp=2))
    rules = (Distrust(before=first.number + 1, step=30), Distrust(before=first.number + 2, step=60))
    later = [replace(first, number=first.number + more, leader="n1", distrusted=rules[:more]) for more in (1, 1, 2)]
    for name in ("n0", "n1"):
        journal = Journal(str(tmp_path), "run", name)
        for sealed in (first, *later):
            journal.noted(m.GenerationPut(generation=sealed, revision=sealed.number))
        assert journal.flush(30)
        journal.close()
    lines = {name: (tmp_path / f"{name}-0.jsonl").read_text().splitlines() for name in ("n0", "n1")}
    events = {name: [json.loads(line) for line in these] for name, these in lines.items()}
    said = {
        name: [(event["step"], event["before"]) for event in these if event["event"] == "state.distrusted"]
        for name, these in events.items()
    }
    assert said == {"n0": [], "n1": [(rule.step, rule.before) for rule in rules]}


def test_a_rule_for_a_spike_says_so(tmp_path: Path) -> None:
    """Nobody is to look for a device that computes wrongly."""
    first = generation(Layout(pp=1, dp=2))
    rule = Distrust(before=first.number + 1, step=30)
    back = Rollback(before=rule.before, step=30, spike=130, first=360, stop=1560)
    journal = Journal(str(tmp_path), "run", "n1")
    for sealed in (first, replace(first, number=rule.before, leader="n1", distrusted=(rule,), rollbacks=(back,))):
        journal.noted(m.GenerationPut(generation=sealed, revision=sealed.number))
    journal.close()
    events = [json.loads(line) for line in (tmp_path / "n1-0.jsonl").read_text().splitlines()]
    (said,) = [event["detail"] for event in events if event["event"] == "state.distrusted"]
    assert "they led to the spike of the loss in step 130" in said
    assert "computes wrongly" not in said

"""The account of a long job says what the picture of all its events says, and keeps little of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from chaos.growth import account
from chaos.growth.account import Account
from chaos.history.claims import deposed
from chaos.history.follow import Event, ledger, picture
from tests.chaos.made_up_events import BATCH, a_death_and_a_join, event, sealed, step


def heard(events: list[Event], each: int = 7) -> Account:
    """Return the account of some events, heard a few at a time."""
    one = Account()
    for at in range(0, len(events), each):
        one.hear(events[at : at + each], ())
    return one


def long_job(generations: int, steps: int) -> list[Event]:
    """Return a job whose generations make so many steps each, the first of which was made before."""
    events: list[Event] = []
    number, at = 0, 0.0
    for generation in range(1, generations + 1):
        events.append(sealed(generation, at, "start" if generation == 1 else "death", ["node0", "node1"]))
        number = max(0, number - 1)
        for _ in range(steps):
            number, at = number + 1, at + 1.0
            events.append(step(number, at, generation))
        events.append(event("checkpoint.committed", at, generation=generation, step=number, moved=True))
    return events


def test_a_short_job_is_accounted_for_as_a_whole() -> None:
    """Steps, repeats and the present generation."""
    events = a_death_and_a_join()
    one, all_of_it = heard(events), picture(events)
    assert one.whole().steps == all_of_it.steps
    assert one.picture.generation == all_of_it.generation
    assert {number: known.cause for number, known in one.generations.items()} == {1: "start", 2: "death", 3: "join"}
    assert one.generations[2].repeated == 1
    assert one.wrong == ""


def test_a_long_job_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its samples are counted all the same, and those of a step that is missing too."""
    monkeypatch.setattr(account, "RECENT", 50)
    monkeypatch.setattr(account, "REACH", 60)
    events = long_job(40, 30)
    one = heard(events)
    whole = one.whole()
    assert len(one._events) <= 2 * 50 + 4
    assert len(whole.steps) < 2 * 60 + 10
    last = whole.steps[-1].number
    samples = ledger(whole.steps, last * BATCH)
    assert (samples.consumed, samples.missing, samples.repeated) == (last * BATCH, 0, 0)
    assert whole.checkpoints == (last,)
    assert len(one.generations) == 40
    assert sum(known.repeated for known in one.generations.values()) == 39
    assert not one.wrong

    gap = [one for one in events if not (one.name == "step.committed" and one.fields["step"] == 100)]
    assert heard(gap).wrong == f"step 101 begins with sample {100 * BATCH}, not {99 * BATCH}"


def test_who_noticed_what_is_kept_of_a_long_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """And when the last step was made, without which nobody knows whether there was time to notice it."""
    monkeypatch.setattr(account, "RECENT", 50)
    monkeypatch.setattr(account, "REACH", 60)
    events = long_job(40, 30)
    left = event("node.draining", 5.5, node="node1", seconds=None, detail="")
    noted = heard([*events[:6], left, *events[6:]]).noted
    assert [one for one in noted if one.name == "node.draining"] == [left]
    assert [one.at for one in noted if one.name == "step.committed"] == [40 * 30.0]
    assert len([one for one in noted if one.name == "generation.sealed"]) == 40


def test_who_committed_is_kept_of_a_long_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever commits after another one has taken over is seen, hours later too."""
    monkeypatch.setattr(account, "RECENT", 50)
    events = long_job(3, 30)
    leads = [replace(events[-1], node=node, at=200.0 + at) for at, node in enumerate(("a", "b", "a", "b"))]
    one = heard([*events, *leads, *(step(n, 300.0 + n, 3) for n in range(90, 400))])
    assert [commit.node for commit in deposed(one.whole().commits)] == ["a"]


def test_other_bits_are_found_at_once() -> None:
    """Among the latest steps by the picture, among older ones when they are settled."""
    events = long_job(2, 5)
    events[-2] = replace(events[-2], fields={**events[-2].fields, "step": 5, "loss": (1.0).hex()})
    one = heard(events)
    assert "step 5 was done again with other bits" in one.wrong


def test_a_step_long_gone_cannot_be_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is said."""
    monkeypatch.setattr(account, "REACH", 20)
    one = heard([*long_job(2, 100), sealed(3, 500.0, "death", ["node0"]), step(3, 501.0, 3)])
    assert one.wrong == "step 3 was done again, more than 20 steps after it"


def test_who_was_named_and_who_was_lost_is_known_of_the_whole_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long ago; also a node that a generation left out without a word, but not one whose job had ended."""
    monkeypatch.setattr(account, "RECENT", 20)
    events = long_job(10, 10)
    first = events[3].at
    named = event("rank.stuck", first, nodes=["node1"], ranks=[1], fault="stopped", act=True, detail="it stands")
    events[4:4] = [named, event("peer.lost", first, peer="node1", evidence="refused")]
    at = events[-1].at
    left_out = [sealed(11, at + 1.0, "death", ["node0"]), step(92, at + 2.0, 11)]
    ends = [event("peer.lost", at + 3.0, peer="node0", evidence="refused"), event("job.ended", at + 4.0, kind="done")]
    whole = heard([*events, *left_out, *ends]).whole()
    assert [one.nodes for one in whole.accused] == [("node1",)]
    assert [(one.event, one.node) for one in whole.lost] == [("peer.lost", "node1"), ("generation.sealed", "node1")]

"""Ranks that stand still: what a member writes of its own, and what the leader makes of those of all."""

from __future__ import annotations

from dataclasses import replace

import pytest

from chaos.simulation.standstills import At, judge, stall
from elastic3d import etcd_keys as keys
from elastic3d.etcd import KeyValue, Put
from elastic3d.membership import actions as acts
from elastic3d.membership import events as e
from elastic3d.membership.machine.core import Core
from elastic3d.membership.machine.own_stall import OwnStall
from elastic3d.membership.machine.stalls import Stalls
from elastic3d.membership.machine.view import View
from elastic3d.membership.reading import read
from elastic3d.membership.records import MemberRecord, Report, decode, encode
from elastic3d.membership.stalls import RankState, Stall, Verdict, aged, outline, suspected
from elastic3d.membership.transactions import lease_of, own_lease, transaction
from elastic3d.values import Cause, Generation, Node, Slot
from tests.membership.story import Story

A, B, C = (Node(name=name, incarnation="1", address="h", slots=(Slot(tile_port=1),)) for name in "abc")
SEALED = Generation(number=4, attempt=17, cause=Cause.START, nodes=(A, B, C))
ROOT = "/job/"


class Slow(Story):
    """A story in which what a verdict leads to takes a moment on its way to etcd. decided: all of that."""

    def __init__(self) -> None:
        super().__init__()
        self.decided: list[acts.Seal] = []

    def write(self, name: str, core: Core, action: acts.Write) -> None:
        if isinstance(action, acts.Seal) and action.verdict is not None:
            self.decided.append(action)
            self.later(0.1, lambda: super(Slow, self).write(name, core, action))
        else:
            super().write(name, core, action)


def stuck(at: At = At.FAULT, *, silent: float = 3.0) -> Stall:
    return stall(SEALED, B, at, step=9, silent=silent)


def test_a_stall_is_read_as_it_was_written() -> None:
    """Under the incarnation's own key; one that names another incarnation, or is garbage, counts as none."""
    put = transaction(ROOT, B, acts.PutStall(stall=stuck(At.ODD)), 7)
    (operation,) = put.operations
    assert isinstance(operation, Put)
    assert operation.lease == 7
    item = KeyValue(key=operation.key, value=operation.value, create_revision=3, mod_revision=5, version=2, lease=7)
    assert read(ROOT, item) == e.StallPut(id=B.id, stall=stuck(At.ODD), created=3, revision=5)
    for value in (encode(replace(stuck(), incarnation="2")), b"{]"):
        assert read(ROOT, replace(item, value=value)) == e.StallGone(id=B.id, revision=5)


def test_a_verdict_is_read_as_it_was_written() -> None:
    """Under the key of the generation that it is about, in order of their numbers."""
    said = {each.id: stall(SEALED, each, At.FAULT if each is B else At.WAIT) for each in (A, B, C)}
    verdict = judge(SEALED, said, 1.0)
    assert verdict is not None
    assert decode(Verdict, encode(verdict), "the/key") == verdict
    assert keys.verdict("4.17") == "verdicts/0000000004.17"
    assert keys.verdict("9.1") < keys.verdict("10.1")


def test_time_alone_does_not_change_a_stall() -> None:
    """Silence grows, and so does the time since a stopped rank ran Python; what the stall says remains."""
    now = aged(stuck(), 2.5)
    assert [rank.silent for rank in now.ranks] == [5500]
    assert [rank.beat for rank in now.ranks] == [2500]
    assert [rank.beat for rank in aged(stuck(At.WAIT), 2.5).ranks] == [0]
    assert outline(now) == outline(stuck())
    assert outline(stuck(At.WAIT)) != outline(stuck())


def test_a_rank_that_moves_is_not_made_silent() -> None:
    """Beside a silent one on its node: as long as the node says nothing else, it moves."""
    both = stuck(silent=0.5)
    assert aged(both, 20.0) == both
    assert outline(both) != outline(stuck(silent=1.0))
    assert outline(stuck(silent=1.0)) == outline(stuck(silent=20.0))


def test_ranks_that_only_wait_are_not_suspected() -> None:
    """Those that wait for nobody are, and those with anything odd about them."""
    kinds = {at: suspected(stuck(at).ranks[0]) for at in At}
    assert kinds == {At.FAULT: True, At.ODD: True, At.WAIT: False, At.DATA: True}
    waits = stuck(At.WAIT).ranks[0]
    assert all(suspected(replace(waits, state=state)) for state in RankState if state not in ("idle", "busy"))


def test_a_rank_that_moves_beside_one_that_waits_is_not_suspected() -> None:
    """It computes, and its sibling waits for it, as in any step in which one has more to do; but the dead are."""
    for at in At:
        moves = stuck(at, silent=0.2).ranks[0]
        assert not suspected(moves)
        assert suspected(replace(moves, state=RankState.DEAD))


def test_a_member_writes_what_changed_and_takes_it_back() -> None:
    """Also when its keys were lost; and it takes it back when the generation has ended."""
    view, own = View(MemberRecord(node=B)), OwnStall()
    view.generation = SEALED

    def written(now: float) -> list[acts.Action]:
        actions: list[acts.Action] = []
        own.follow(view, actions, now)
        return actions

    own.silent(stuck(), 10.0)
    assert written(10.0) == [acts.PutStall(stall=stuck())]
    own.silent(stuck(silent=3.5), 10.5)
    assert written(10.5) == []
    own.silent(stuck(At.WAIT, silent=4.0), 11.0)
    assert written(11.0) == [acts.PutStall(stall=stuck(At.WAIT, silent=4.0))]
    own.write_again()
    assert written(13.0) == [acts.PutStall(stall=stuck(At.WAIT, silent=6.0))]
    own.moving("3.1")
    assert written(13.0) == []
    own.moving(SEALED.key)
    assert written(13.0) == [acts.DropStall()]
    assert written(13.0) == []
    own.silent(stuck(), 14.0)
    written(14.0)
    view.generation = replace(SEALED, number=5)
    assert written(14.0) == [acts.DropStall()]


def test_the_leader_hears_stalls_as_they_are_now() -> None:
    """By its own clock since it heard them; a stall taken back and written again is another one."""
    stalls = Stalls()
    stalls.hear(B.id, stuck(), created=5, now=100.0)
    stalls.hear(A.id, stall(replace(SEALED, number=3), A, At.WAIT), created=6, now=100.0)
    assert stalls.count(SEALED.key) == 1
    assert stalls.of(SEALED.key, (A.id, B.id), 102.0) == {B.id: aged(stuck(), 2.0)}
    version = stalls.version
    stalls.hear(B.id, stuck(silent=4.0), created=5, now=101.0)
    assert (stalls.version, stalls.changed_at) == (version, 100.0)
    assert stalls.of(SEALED.key, (B.id,), 101.0) == {B.id: stuck(silent=4.0)}
    stalls.hear(B.id, stuck(silent=4.0), created=9, now=103.0)
    assert (stalls.version, stalls.changed_at) == (version + 1, 103.0)
    assert stalls.created((A.id, B.id, C.id)) == ((A.id, 6), (B.id, 9))
    stalls.forget(B.id, 104.0)
    assert (stalls.count(SEALED.key), stalls.changed_at) == (0, 104.0)


def test_what_a_leader_heard_does_not_age_while_it_does_not_run() -> None:
    """Nor does what it heard only afterwards."""
    stalls = Stalls()
    stalls.hear(B.id, stuck(), created=5, now=100.0)
    stalls.hear(A.id, stall(SEALED, A, At.WAIT), created=6, now=120.0)
    stalls.missed(19.0, 120.0)
    assert stalls.of(SEALED.key, (A.id, B.id), 120.5) == {
        A.id: aged(stall(SEALED, A, At.WAIT), 0.5),
        B.id: aged(stuck(), 1.5),
    }


@pytest.mark.parametrize("moves", [True, False])
def test_a_leader_that_did_not_run_hears_others_out_before_it_judges(moves: bool) -> None:
    """A machine that was suspended: whoever moves again has time to say so, and whoever does not is found."""
    story = Story()
    story.tell("> policy minimum=2 maximum=3\n> start a b c\n> run 5\n> step 40\n> stuck b\n> run 0.2")
    story.stopped.update(story.cores)
    story.advance(6.0)
    for name in story.cores:
        story.wake(name)
    story.tell("> run 1")
    if moves:
        story.tell("> moves")
    story.tell("> run 5")
    assert [each.cause for each in story.sealed] == [Cause.START] if moves else [Cause.START, Cause.STUCK]


def test_a_seal_rests_on_the_stalls_it_was_decided_upon() -> None:
    """The same goes for the job's end: if the culprit moves again in between, etcd refuses both."""
    story = Slow()
    story.tell("> policy minimum=2 maximum=3\n> start a b c\n> run 5\n> step 40\n> stuck b")
    while not story.decided:
        story.advance(0.01)
    story.tell("> moves\n> run 5")
    assert [id for id, _ in story.decided[0].standing] == [story.cores["b"].record.node.id]
    assert len(story.sealed) == 1
    assert not [key for key in story.keys.items if "stalls" in key or "verdicts" in key]


def test_what_a_seal_was_decided_upon_is_written_with_it() -> None:
    """And forgotten with the history of its generation."""
    story = Story()
    story.tell("> policy minimum=2 maximum=3\n> start a b c\n> run 3\n> step 40\n> stuck b\n> run 2")
    first, second = story.sealed
    assert (second.cause, second.detail) == (Cause.STUCK, "all wait for b (stopped)")
    verdict = decode(Verdict, story.keys.items[ROOT + keys.verdict(first.key)].value, "the/key")
    assert (verdict.key, verdict.culprits, verdict.act) == (first.key, (story.cores["b"].record.node.id,), True)


def test_late_words_of_an_earlier_generation_say_nothing() -> None:
    """Neither the watch's, of trainers that are gone, nor their stalls that still stand in etcd."""
    story = Story()
    story.tell("> policy minimum=2 maximum=3\n> start a b c\n> run 3\n> step 40")
    old = {name: stall(story.sealed[0], core.record.node, At.FAULT) for name, core in story.cores.items()}
    story.tell("> fail b\n> run 3")
    assert [each.cause for each in story.sealed] == [Cause.START, Cause.FAILURE]
    for name, said in old.items():
        story.to(name, e.RanksSilent(stall=said))
        id = story.cores[name].record.node.id
        story.publish(story.operate(Put(f"{ROOT}roll/stalls/{id}", encode(said))))
    story.tell("> run 5")
    assert len(story.sealed) == 2
    assert "finds" not in "\n".join(story.lines)


def test_stalls_are_written_under_the_own_lease() -> None:
    """They vanish with their member; a newer one replaces what waits to be written."""
    put, drop = acts.PutStall(stall=stuck()), acts.DropStall()
    assert (lease_of(put, 3.0), own_lease(put)) == (3.0, True)
    assert (lease_of(drop, 3.0), own_lease(drop)) == (None, False)
    report = acts.PutReport(report=Report(incarnation="1"))
    pairs = [(new, old) for new in (put, drop, report) for old in (put, drop, report) if acts.replaces(new, old)]
    assert pairs == [(put, put), (put, drop), (drop, put), (drop, drop), (report, report)]

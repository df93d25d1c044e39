"""What a node says of its silent ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest

from elastic3d.membership import events as m
from elastic3d.membership.stalls import RankStall, RankState
from elastic3d.worker.keeper.silence import EACH, PATIENCE, Silence
from elastic3d.worker.processes import events as w
from elastic3d.worker.processes.slot import SlotPort
from tests.clocks import HandClock

STALL = RankStall(
    rank=4,
    step=9,
    made=3,
    phase="forward",
    silent=3000,
    allowed_idle=3000,
    allowed_busy=30000,
    beat=10,
    state=RankState.IDLE,
)


class Slot:
    """A slot that only remembers who is followed."""

    def __init__(self) -> None:
        self.followed: list[tuple[int, bool]] = []

    def follow(self, trainer: int, on: bool) -> None:
        self.followed.append((trainer, on))


class Node:
    """A node of two slots, whose trainers 11 and 12 have ranks 4 and 5."""

    def __init__(self) -> None:
        self.clock = HandClock()
        self.slots = [Slot(), Slot()]
        self.reported: list[m.Event] = []
        self.events: list[str] = []
        self.silence = Silence(
            cast(list[SlotPort], self.slots),
            self.reported.append,
            emit=lambda name, **fields: self.events.append(name),
            clock=self.clock,
        )
        self.silence.begin("2.0", "me", {0: 11, 1: 12})

    def hear(self, slot: int, *, over: bool = True, **changes: Any) -> None:
        stall = replace(STALL, rank=4 + slot, **changes)
        self.silence.heard(w.RankSilent(slot=slot, trainer=11 + slot, rank=stall, over=over))
        self.silence.look()

    def moves(self, slot: int) -> None:
        self.silence.heard(w.RankMoving(slot=slot, trainer=11 + slot))
        self.silence.look()

    def ranks(self) -> list[tuple[int, int]]:
        last = self.reported[-1]
        assert isinstance(last, m.RanksSilent)
        assert (last.stall.key, last.stall.incarnation) == ("2.0", "me")
        return [(rank.rank, rank.silent) for rank in last.stall.ranks]

    def wait(self, seconds: float) -> None:
        self.clock.now += seconds
        self.silence.look()


@pytest.fixture
def node() -> Node:
    return Node()


def test_all_ranks_are_named_when_one_is_silent(node: Node) -> None:
    """The others are asked, and the stall waits for what they are at."""
    node.hear(0)
    assert node.reported == []
    assert [slot.followed for slot in node.slots] == [[(11, True)], [(12, True)]]
    node.hear(1, over=False, silent=120)
    assert node.ranks() == [(4, 3000), (5, 120)]
    assert node.events == ["rank.silent"]


def test_a_keeper_that_does_not_answer_hides_nothing(node: Node) -> None:
    """What there is goes out after a while."""
    node.hear(0)
    assert node.silence.pause is not None
    node.wait(PATIENCE)
    assert node.ranks() == [(4, 3000)]
    assert node.silence.pause is None


def test_changes_are_reported_at_most_twice_a_second(node: Node) -> None:
    """However many there are."""
    node.hear(0)
    node.hear(1)
    node.hear(1, silent=5000)
    assert len(node.reported) == 1
    node.wait(EACH)
    assert node.ranks() == [(4, 3000), (5, 5000)]
    node.wait(EACH)
    assert len(node.reported) == 2


def test_it_is_taken_back_when_nobody_is_silent_any_more(node: Node) -> None:
    """Not while one of two still is."""
    node.hear(0)
    node.hear(1)
    node.moves(0)
    assert isinstance(node.reported[-1], m.RanksSilent)
    node.moves(1)
    assert node.reported[-1] == m.RanksMoving(key="2.0")
    assert [slot.followed[-1] for slot in node.slots] == [(11, False), (12, False)]
    assert node.events == ["rank.silent", "rank.silent", "rank.moving", "rank.moving"]
    node.wait(10.0)
    assert len(node.reported) == 2


def test_a_dead_rank_is_named_with_those_that_were_stopped_after_it(node: Node) -> None:
    """The record outlives the trainers until the node has others."""
    node.hear(0, state=RankState.DEAD)
    node.silence.ended(0, 11)
    node.hear(1, over=False, state=RankState.DEAD)
    node.silence.ended(1, 12)
    assert node.ranks() == [(4, 3000), (5, 3000)]
    node.silence.begin("3.0", "me", {0: 13, 1: 14})
    assert node.reported[-1] == m.RanksMoving(key="2.0")


def test_ends_without_a_cause_are_not_reported(node: Node) -> None:
    """All trainers of a generation are stopped whenever another one begins."""
    for slot in (0, 1):
        node.hear(slot, over=False, state=RankState.DEAD)
        node.silence.ended(slot, 11 + slot)
    node.wait(PATIENCE)
    assert node.reported == []


def test_trainers_of_another_generation_say_nothing(node: Node) -> None:
    """Those that are prepared beside the running ones, or were before."""
    node.silence.heard(w.RankSilent(slot=0, trainer=13, rank=STALL, over=True))
    node.wait(PATIENCE)
    assert node.reported == []

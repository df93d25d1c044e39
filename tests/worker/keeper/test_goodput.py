"""The account of a job's time in its keepers: what they hear, and what becomes of it when another one leads."""

from __future__ import annotations

import json
from typing import Any

import pytest

from elastic3d.accounting.live_account import LiveAccount
from elastic3d.accounting.live_record import GoodputRecord
from elastic3d.membership import events as m
from elastic3d.membership.records import SCHEMA, MemberRecord, Out, Pulse, Tomb, decode, encode
from elastic3d.port import StepRecord
from elastic3d.values import Cause, Generation, Node
from elastic3d.worker.keeper.goodput import EVERY, LiveGoodput
from tests.clocks import HandClock

A, B, C = (Node(name=name, incarnation="1", address="", slots=()) for name in "abc")


class Keeper:
    """The account of one node, with a clock of its own, which runs `ahead` of others."""

    def __init__(self, node: str, ahead: float = 0.0) -> None:
        self.clock, self.ahead = HandClock(wall=1000.0), ahead
        self.said: list[str] = []
        self.goodput = LiveGoodput(node, self.said.append, clock=self.clock)

    def hear(self, at: float, name: str, generation: int = 0, **fields: Any) -> None:
        self.clock.now = at + self.ahead
        self.goodput.observe(name, {"generation": generation, "rank": 0, **fields})

    def seal(
        self, at: float, number: int, nodes: tuple[Node, ...], cause: Cause, spares: tuple[Node, ...] = ()
    ) -> None:
        self.clock.now = at + self.ahead
        formed = Generation(number=number, cause=cause, nodes=nodes, spares=spares)
        self.goodput.noted(m.GenerationPut(generation=formed, revision=number))
        names: dict[str, Any] = {"nodes": [node.name for node in nodes], "spares": [node.name for node in spares]}
        self.hear(at, "generation.sealed", number=number, cause=str(cause), **names)

    def step(self, at: float, step: int, generation: int = 1) -> None:
        self.clock.now = at + self.ahead
        self.goodput.stepped(
            StepRecord(
                generation=generation,
                step=step,
                loss=1.0,
                gradient_norm=None,
                seconds=1.0,
                safe_step=-1,
                etcd_away_everywhere=False,
                samples=(0, 1),
                sample_sum=0,
            )
        )

    def lead(self, at: float, value: bytes | None) -> None:
        self.clock.now = at + self.ahead
        self.goodput.resume(value)

    def due(self, at: float, *, last: bool = False) -> bytes | None:
        """Return what is written, as if etcd took it."""
        self.clock.now = at + self.ahead
        value = self.goodput.due(last=last)
        if value is not None:
            self.goodput.wrote()
        return value

    def spent(self, at: float) -> dict[str, float]:
        value = self.due(at, last=True)
        assert value is not None
        record = decode(GoodputRecord, value, "goodput")
        return {name: time / 1e6 for name, time in record.by_category.items()}


def test_another_leader_goes_on_with_its_own_clock() -> None:
    """From the last step that the record has, though that was written before others, and clocks differ by hours."""
    a, b = Keeper("a"), Keeper("b", ahead=7200.0)
    a.lead(0, None)
    for keeper in (a, b):
        keeper.seal(0, 1, (A, B, C), Cause.START)
        for step in range(1, 5):
            keeper.step(step, step)
    value = a.due(4.5)
    for keeper in (a, b):
        keeper.step(5, 5)
    b.hear(6.5, "trainer.exited", 1, kind="peer_lost")
    b.goodput.noted(m.TombPut(id=A.id, tomb=Tomb(incarnation="1", how=Out.DEAD), revision=5))
    b.lead(8, value)
    b.seal(9, 2, (B, C), Cause.DEATH)
    b.step(11, 6, 2)
    assert b.spent(11) == {"useful": 17.0, "repeated": 3.0, "noticing": 1.0, "forming": 5.0, "preparing": 2.0}
    assert (a.said, b.said) == ([], [])


def test_a_record_is_written_now_and_then_and_for_each_generation() -> None:
    """Not before there is a generation; one that etcd did not take is due again."""
    a = Keeper("a")
    a.lead(0, None)
    assert a.due(1) is None
    a.seal(2, 1, (A, B), Cause.START)
    assert a.goodput.due(last=False) is not None
    assert a.due(3) is not None
    assert a.due(3 + EVERY - 1) is None
    assert a.due(3 + EVERY) is not None
    a.seal(14, 2, (A, B), Cause.JOIN)
    assert a.due(15) is not None
    assert a.due(16) is None
    assert a.due(16, last=True) is not None
    a.goodput.resign()
    assert a.due(99, last=True) is None


def test_what_cannot_be_read_is_begun_anew_and_said_once() -> None:
    """Garbage, half a record, and one that no leader writes; from what this keeper has heard itself."""
    whole = encode(GoodputRecord(by_category={"useful": 5}))
    for garbage in (b"", b"\xff\xfe", whole[: len(whole) // 2], b"[" * 100_000, whole.replace(b"5", b"-5")):
        a = Keeper("a")
        a.seal(0, 1, (A, B), Cause.START)
        a.lead(3, garbage)
        a.lead(4, garbage)
        assert len(a.said) == 1
        assert "from now on" in a.said[0]
        assert a.spent(5) == {"preparing": 10.0}


def test_a_record_that_is_away_is_said_unless_the_run_has_just_begun() -> None:
    """The first leader may have died before it wrote anything."""
    a, b = Keeper("a"), Keeper("b")
    a.seal(0, 1, (A, B), Cause.START)
    a.lead(1, None)
    assert a.said == []
    b.seal(0, 7, (A, B), Cause.DEATH)
    b.lead(1, None)
    assert len(b.said) == 1


def test_a_newer_version_s_record_is_left_alone() -> None:
    """Nobody may guess its meaning, let alone write over it."""
    a = Keeper("a")
    a.seal(0, 1, (A, B), Cause.START)
    a.lead(1, json.dumps({"schema": SCHEMA + 1}).encode())
    assert a.due(20, last=True) is None
    assert "upgrade" in a.said[0]


def test_a_leader_that_did_not_train_along_goes_on_from_now() -> None:
    """What lies between is in no category: it heard of no step."""
    a, c = Keeper("a"), Keeper("c")
    a.lead(0, None)
    for keeper in (a, c):
        keeper.seal(0, 1, (A, B), Cause.START, spares=(C,))
    for step in range(1, 4):
        a.step(step, step)
    value = a.due(3)
    c.lead(10, value)
    assert c.spent(12) == {"useful": 6.0, "spare": 5.0, "unknown": 4.0}


def test_a_leader_without_trainers_is_told_of_steps_now_and_then() -> None:
    """From the first one on their time is useful, without doubled or missing steps for whoever leads after it."""
    a, spare = Keeper("a"), Keeper("c")
    for keeper in (a, spare):
        keeper.seal(0, 1, (A, B), Cause.START, (C,))
    spare.lead(0, None)

    def ask(at: float, step: int, generation: int = 1) -> bool:
        spare.clock.now = at
        asked = spare.goodput.asks()
        if asked:
            spare.goodput.told(encode(Pulse(state="active", generation=generation, every=5.0, step=step)))
        return asked == A.id

    assert ask(1, -1)
    assert not ask(5, 2)
    for step in range(3, 34):
        a.step(step, step - 2)
    assert ask(12, 10)
    assert ask(22, 20)
    assert not ask(30, 28)
    assert ask(32, 30)
    assert spare.spent(32) == {"unknown": 24.0, "useful": 40.0, "spare": 32.0}
    value = spare.due(32, last=True)
    a.lead(33, value)
    assert a.spent(33) == {"unknown": 24.0, "useful": 42.0, "spare": 33.0}
    assert ask(42, 99, generation=2)  # of a generation of which nobody has heard
    assert ask(52, 7)
    spare.clock.now = 62.0
    spare.goodput.told(b"garbage")
    assert spare.spent(62) == {"unknown": 24.0 + 60.0, "useful": 40.0, "spare": 62.0}
    assert a.goodput.asks() == ""


def test_newcomers_and_leavers_are_counted_while_one_leads() -> None:
    """By the keys of the roster; a member of the generation is neither."""
    a = Keeper("a")
    a.lead(0, None)
    put = [m.MemberPut(record=MemberRecord(node=node), order=1, revision=1) for node in (A, B, C)]
    a.clock.now = 0.0
    a.goodput.noted(m.Listed(tier=m.Tier.ROSTER, items=tuple(put[:2]), revision=1))
    a.seal(2, 1, (A, B), Cause.START)
    a.clock.now = 4.0
    a.goodput.noted(put[2])
    a.seal(6, 2, (A, C), Cause.DRAIN)
    a.clock.now = 9.0
    a.goodput.noted(m.MemberGone(id=B.id, revision=9))
    spent = a.spent(10)
    assert spent["joining"] == 2 * 2.0 + 2.0
    assert spent["leaving"] == 3.0


def test_what_a_node_counted_never_shrinks() -> None:
    """Also where steps are lost, and when it leads again; as counters have to."""
    a = Keeper("a")
    a.lead(0, None)
    a.seal(0, 1, (A, B), Cause.START)
    for step in range(1, 5):
        a.step(step, step)
    assert a.goodput.seconds()["useful"] == 8.0
    a.hear(4, "trainer.exited", 1, kind="crash")
    a.seal(5, 2, (A, B), Cause.FAILURE)
    a.hear(6, "state.restored", 2, step=1, parts=[])
    assert a.goodput.seconds()["useful"] == 8.0
    assert a.goodput.seconds()["repeated"] == 6.0
    a.step(7, 2, 2)
    value = a.due(7, last=True)
    a.goodput.resign()
    a.clock.now = 50.0
    before = a.goodput.seconds()
    a.clock.now = 60.0
    assert a.goodput.seconds() == before
    a.lead(60, value)
    assert all(a.goodput.seconds()[name] >= seconds for name, seconds in before.items())


def test_odd_fields_of_events_change_nothing() -> None:
    """As those of another version might have."""
    a = Keeper("a")
    a.lead(0, None)
    a.seal(0, 1, (A,), Cause.START)
    a.hear(1, "state.restored", 1, step=0, parts=[["building", "soon", 0.0], [], 7])
    a.hear(2, "node.slow", 1, nodes=["a"], kind="compute", cost=None, since=1, step=object(), ranks=[0])
    a.hear(2, "generation.sealed", number="2", nodes=None, cause=3)
    a.step(3, 1)
    assert a.spent(3) == {"preparing": 2.0, "useful": 1.0}
    assert a.said == []


def test_an_account_that_fails_does_not_end_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is said once, and nothing is counted any more."""
    a = Keeper("a")
    a.lead(0, None)

    def take(account: LiveAccount, said: object) -> None:
        raise ZeroDivisionError("an account")

    monkeypatch.setattr(LiveAccount, "take", take)
    a.seal(0, 1, (A,), Cause.START)
    a.step(3, 1)
    assert a.due(4, last=True) is None
    assert a.said == ["ZeroDivisionError: an account; nothing is counted any more"]

"""The writer against a real etcd: its promises about order, leases, refusals, pulses, and outages."""

from __future__ import annotations

import queue
import secrets
import time
from collections.abc import Callable, Iterator

import pytest

from chaos.servers.etcd import EtcdServer
from elastic3d.clock import SYSTEM
from elastic3d.etcd import Compacted, EtcdClient
from elastic3d.membership import actions as acts
from elastic3d.membership import events as e
from elastic3d.membership.driver.compaction import Compaction
from elastic3d.membership.driver.writer import MemberWriter
from elastic3d.membership.records import (
    Claim,
    Doubt,
    Flap,
    MemberRecord,
    Out,
    Pulse,
    Quarantine,
    Report,
    Tomb,
    decode,
)
from elastic3d.values import Node

pytestmark = pytest.mark.etcd

TTL = 2.0


class Account:
    """An account that is always due. resumed: what it went on from; last: how often it was the last time.

    asked: the member whose pulse it is told.
    """

    def __init__(self) -> None:
        self.value, self.written, self.last = b"one", 0, 0
        self.resumed: list[bytes | None] = []
        self.asked, self.heard = "", b""

    def resume(self, value: bytes | None) -> None:
        self.resumed.append(value)

    def due(self, *, last: bool) -> bytes | None:
        self.last += last
        return self.value

    def asks(self) -> str:
        return self.asked

    def told(self, value: bytes) -> None:
        self.heard = value

    def resign(self) -> None:
        self.resumed.append(b"resigned")

    def wrote(self) -> None:
        self.written += 1


class Desk:
    """A writer, its events, and the keys in etcd."""

    def __init__(
        self,
        etcd: EtcdServer,
        period: float = 1e6,
        *,
        leads: bool = False,
        compaction: Compaction | None = None,
        goodput: Account | None = None,
    ) -> None:
        self.token = int(leads)
        self.etcd = etcd
        self.root = f"/test/{secrets.token_hex(4)}/"
        self.client, self.other = EtcdClient(etcd.endpoint), EtcdClient(etcd.endpoint)
        self.leases = set(self.other.leases())
        self.events: queue.SimpleQueue[e.Event] = queue.SimpleQueue()
        self.me = Node(name="a", incarnation="1", address="127.0.0.1", slots=())
        self.writer = MemberWriter(
            self.client,
            self.root,
            self.me,
            TTL,
            self.events.put,
            lambda: Pulse(state="active", generation=3, every=0),
            lambda: period,
            SYSTEM,
            token=lambda: self.token,
            goodput=goodput,
            compaction=compaction or Compaction(kept=0.3, every=0.2),
        )
        self.writer.start()

    def write(self, *actions: acts.Write) -> None:
        for action in actions:
            self.writer.write(action)

    def register(self) -> None:
        self.write(acts.PutMember(record=MemberRecord(node=self.me)), acts.PutReport(report=Report(incarnation="1")))
        assert isinstance(self.next(), e.Registered)

    def next(self, seconds: float = 3.0) -> e.Event:
        return self.events.get(timeout=seconds)

    def there(self) -> set[str]:
        items, _revision = self.other.range(self.root)
        return {item.key.removeprefix(self.root) for item in items}

    def reported(self) -> int | None:
        """Return the step of the report that is there, None while there is none."""
        item = self.other.get(self.root + "roll/reports/a@1")
        return None if item is None else decode(Report, item.value, item.key).step

    def new_leases(self) -> set[int]:
        return set(self.other.leases()) - self.leases

    def close(self) -> None:
        self.writer.close()
        self.client.close()
        self.other.close()


def wait(condition: Callable[[], object], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def etcd() -> Iterator[EtcdServer]:
    """A server for all; a test that stops it resumes it."""
    with EtcdServer() as server:
        yield server


@pytest.fixture
def desk(etcd: EtcdServer) -> Iterator[Desk]:
    """A writer that hardly sends pulses."""
    desk = Desk(etcd)
    yield desk
    desk.close()


def test_the_outcome_of_a_write_is_reported_at_once(desk: Desk) -> None:
    """In the order of the requests; a fenced write that came too late is reported as failed, once."""
    desk.register()
    first, late = acts.Campaign(expected=0), acts.Campaign(expected=0)
    desk.write(first, late)
    led = desk.next()
    assert isinstance(led, e.LeaderPut)
    assert led.claim == Claim(name="a", incarnation="1")
    assert desk.next() == e.WriteDone(write=first, ok=True)
    assert desk.next() == e.WriteDone(write=late, ok=False)
    tomb = Tomb(incarnation="7", how=Out.DEAD)
    bury = acts.Bury(id="b@7", tomb=tomb)
    desk.write(bury)
    assert [type(desk.next()) for _event in range(2)] == [e.TombPut, e.MemberGone]
    assert desk.next() == e.WriteDone(write=bury, ok=True)
    assert desk.there() == {"board/leader", "board/tombs/b@7", "roll/members/a@1", "roll/reports/a@1"}
    assert desk.events.empty()


def test_a_members_own_keys_go_with_it(desk: Desk) -> None:
    """Its keys, claim, doubts and pulse are under one lease, which closing revokes."""
    desk.register()
    desk.write(acts.Campaign(expected=0), acts.PutDoubt(id="b@7", doubt=Doubt(mark="m", by="a@1")))
    desk.writer.flush(3)
    assert len(desk.new_leases()) == 1
    desk.writer.close()
    assert not desk.there()
    assert not desk.new_leases()


def test_quarantines_and_flaps_expire(desk: Desk) -> None:
    """They have leases that nobody renews; a refused one leaves none behind."""
    desk.register()
    desk.write(acts.Campaign(expected=0))
    led = desk.next()
    assert isinstance(led, e.LeaderPut)
    stale = acts.PutQuarantine(place="h", quarantine=Quarantine(seconds=500), token=led.revision + 1)
    desk.write(stale)
    desk.next()
    assert desk.next() == e.WriteDone(write=stale, ok=False)
    assert len(desk.new_leases()) == 1
    desk.write(
        acts.PutQuarantine(place="h", quarantine=Quarantine(seconds=2), token=led.revision),
        acts.PutFlap(place="h", flap=Flap(id="b@7", count=1), seconds=2, token=led.revision),
    )
    desk.writer.flush(3)
    mine = {"board/leader", "roll/members/a@1", "roll/reports/a@1"}
    assert desk.there() == mine | {"roll/quarantine/h", "roll/flaps/h"}
    wait(lambda: desk.there() == mine, 6)


def test_a_buried_member_writes_nothing(desk: Desk) -> None:
    """Neither member nor report: the incarnation is out, and learns so from the board."""
    tomb = acts.Bury(id="a@1", tomb=Tomb(incarnation="1", how=Out.DEAD))
    desk.write(tomb, acts.PutMember(record=MemberRecord(node=desk.me)), acts.PutReport(report=Report(incarnation="1")))
    desk.writer.flush(3)
    assert desk.there() == {"board/tombs/a@1"}
    assert [type(desk.next()) for _event in range(3)] == [e.TombPut, e.MemberGone, e.WriteDone]
    assert desk.events.empty()


def test_a_registered_member_is_not_buried_as_missing(desk: Desk) -> None:
    """etcd decides, not the watch, which may lag; once the key is gone, the same burial succeeds."""
    desk.register()
    bury = acts.Bury(id="a@1", tomb=Tomb(incarnation="1", how=Out.DEAD), missing=True)
    desk.write(bury)
    assert desk.next() == e.WriteDone(write=bury, ok=False)
    assert desk.there() == {"roll/members/a@1", "roll/reports/a@1"}
    desk.other.delete(f"{desk.root}roll/members/a@1")
    desk.write(bury)
    assert [type(desk.next()) for _event in range(2)] == [e.TombPut, e.MemberGone]
    assert desk.next() == e.WriteDone(write=bury, ok=True)


def test_a_registration_is_not_reported_after_its_lease_ended(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process stopped while it registers wakes to both: its lease is over, and its key was written."""
    honest, left = desk.client.txn, [lambda: desk.other.revoke(*desk.new_leases())]

    def late(*conditions: object, **rest: object) -> object:
        """Let the lease end, and its keeper notice, before the answer to the first write arrives."""
        answer = honest(*conditions, **rest)  # type: ignore[arg-type]
        while left:
            left.pop()()
            wait(lambda: not desk.events.empty(), 3)
        return answer

    monkeypatch.setattr(desk.client, "txn", late)
    desk.write(acts.PutMember(record=MemberRecord(node=desk.me)))
    desk.writer.flush(5)
    assert desk.next() == e.Unregistered()
    assert desk.events.empty()
    desk.register()
    desk.writer.flush(3)
    assert desk.there() == {"roll/members/a@1", "roll/reports/a@1"}


@pytest.mark.parametrize("who", ["keepalive", "write"])
def test_a_revoked_lease_is_reported_once(desk: Desk, who: str) -> None:
    """By the next keepalive, or earlier by a write that fails under it and is repeated under a new one."""
    desk.register()
    (lease,) = desk.new_leases()
    desk.other.revoke(lease)
    if who == "write":
        desk.write(acts.PutReport(report=Report(incarnation="1", step=5)))
    assert desk.next(1.5) == e.Unregistered()
    if who == "write":
        wait(lambda: desk.there() == {"roll/reports/a@1"}, 2)
    with pytest.raises(queue.Empty):
        desk.next(1.2)
    desk.register()


def test_the_pulse_notices_a_deleted_member_key(etcd: EtcdServer) -> None:
    """It is written only while the member's key is unchanged, and reports if it is not."""
    desk = Desk(etcd, period=0.3)
    try:
        desk.register()
        wait(lambda: "pulses/a@1" in desk.there(), 2)
        item = desk.other.get(desk.root + "pulses/a@1")
        assert item is not None
        assert decode(Pulse, item.value, item.key) == Pulse(state="active", generation=3, every=0.3)
        for _time in range(2):
            desk.other.delete(desk.root + "roll/members/a@1")
            assert desk.next(1) == e.Unregistered()
            with pytest.raises(queue.Empty):
                desk.next(0.7)
            desk.register()
    finally:
        desk.close()


def test_a_problem_is_reported_again_after_another_one(desk: Desk) -> None:
    """The last report is the current one; the same twice in a row is reported once."""
    for reason in ("a wrong password", "a wrong password"):
        desk.writer.impaired(reason)
    desk.writer.away("connection refused")
    for reason in ("a wrong password", "", ""):
        desk.writer.impaired(reason)
    impairments = [desk.events.get_nowait() for _ in range(desk.events.qsize())]
    assert impairments == [e.EtcdImpaired(reason=reason) for reason in ("a wrong password", "a wrong password", "")]


def test_an_etcd_outage_loses_no_write_and_closing_does_not_hang(etcd: EtcdServer) -> None:
    """Writes wait for etcd, and only reports give way to newer ones; closing does not wait for an answer."""
    desk, other = Desk(etcd), Desk(etcd)
    try:
        desk.register()
        other.register()
        etcd.pause()
        try:
            desk.write(acts.Bury(id="b@7", tomb=Tomb(incarnation="7", how=Out.DEAD)))
            for step in range(5):
                desk.write(acts.PutReport(report=Report(incarnation="1", step=step)))
            other.write(acts.PutReport(report=Report(incarnation="1", step=9)))
            began = time.monotonic()
            other.writer.close()
            assert time.monotonic() - began < 6
            time.sleep(TTL)
        finally:
            etcd.resume()
        wait(lambda: "board/tombs/b@7" in desk.there(), 8)
        # The report of before may still be there, until the lease ends that it is under.
        wait(lambda: desk.reported() == 4, 8)
    finally:
        desk.close()
        other.close()


def test_the_leader_compacts_old_history(etcd: EtcdServer) -> None:
    """Old pulses are compacted away while it leads, and current keys stay."""
    desk = Desk(etcd, period=0.05, leads=True)
    try:
        desk.register()
        _items, before = desk.other.range(desk.root)

        def forgotten() -> bool:
            try:
                desk.other.range(desk.root, before)
            except Compacted:
                return True
            return False

        wait(forgotten, 20)
        assert {"roll/members/a@1", "roll/reports/a@1"} <= desk.there()
    finally:
        desk.close()


class Strange(Compaction):
    """Requests what no etcd compacts, several times, before it requests revisions it has seen."""

    def __init__(self) -> None:
        super().__init__(kept=0.3, every=0.2)
        self.refusals = 0

    def due(self, now: float) -> int:
        past = super().due(now)
        if past and self.refusals < 3:
            self.refusals += 1
            return past + 1_000_000
        return past


def test_a_refused_compaction_is_reported_once(etcd: EtcdServer) -> None:
    """With what to do about it, however often it is refused; and once more when etcd compacts again."""
    strange = Strange()
    desk = Desk(etcd, period=0.05, leads=True, compaction=strange)
    try:
        desk.register()
        refused = desk.next(20)
        assert isinstance(refused, e.CompactionRefused)
        assert "--auto-compaction-retention" in refused.reason
        assert desk.next(20) == e.CompactionRefused(reason="")
        assert strange.refusals == 3
    finally:
        desk.close()


def test_old_revisions_are_compacted_once() -> None:
    """Up to the newest revision before the time that is kept; after a rollback of etcd it begins anew."""
    compaction = Compaction(kept=10.0, every=5.0)
    for now in range(20):
        compaction.saw(100 + now, float(now))
    assert compaction.due(19.0) == 109
    assert compaction.due(19.0) == 0
    compaction.saw(120, 22.0)
    assert compaction.due(22.0) == 0
    assert compaction.due(24.0) == 112
    compaction.saw(7, 25.0)
    assert compaction.due(99.0) == 0


def test_a_leaders_account_is_written_with_its_token_only(etcd: EtcdServer) -> None:
    """After the one before was read; whoever leads no more writes nothing, and one that leaves writes it again."""
    account = Account()
    desk = Desk(etcd, 0.05, goodput=account)
    key = desk.root + "goodput"
    try:
        desk.register()
        desk.write(acts.Campaign(expected=0))
        led = desk.next()
        assert isinstance(led, e.LeaderPut)
        assert desk.other.get(key) is None
        desk.other.put(key, b"before", idempotent=True)
        desk.token = led.revision
        wait(lambda: account.written, 5)
        assert account.resumed == [b"before"]
        item = desk.other.get(key)
        assert item is not None
        assert item.value == b"one"
        account.asked = "nobody@1"
        desk.other.put(desk.root + "pulses/other@1", b"a pulse", idempotent=True)
        written = account.written
        wait(lambda: account.written > written + 1, 5)
        assert account.heard == b""
        account.asked = "other@1"
        wait(lambda: account.heard == b"a pulse", 5)
        account.value = b"late"
        desk.other.put(desk.root + "board/leader", b"another", idempotent=True)
        before = account.written
        time.sleep(0.3)
        assert account.written - before <= 1
        account.value = b"very late"
        time.sleep(0.3)
        item = desk.other.get(key)
        assert item is not None
        assert item.value != b"very late"
        desk.token = 0
        wait(lambda: account.resumed[-1] == b"resigned", 5)
        again = desk.other.get(desk.root + "board/leader")
        assert again is not None
        desk.token = again.mod_revision
        account.value = b"last"
        desk.writer.close()
        assert account.last == 1
        item = desk.other.get(key)
        assert item is not None
        assert item.value == b"last"
    finally:
        desk.close()

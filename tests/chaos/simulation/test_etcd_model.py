"""The model of etcd does what the real one does, wherever the safety of members depends on it."""

from __future__ import annotations

from random import Random

from chaos.simulation.etcd import EXPIRY, Answer, Client, Etcd, Speeds
from chaos.simulation.etcd_store import ROOT, Change, Lease
from chaos.simulation.loop import Loop
from elastic3d.etcd import Compare, Delete, Put
from elastic3d.membership.transactions import Transaction

KEY = ROOT + "roll/members/a@1"


class Bench:
    """An etcd, a client, and the answers it got."""

    def __init__(self) -> None:
        self.loop = Loop()
        self.etcd = Etcd(self.loop, Random(1), Speeds())
        self.client = Client(server=0)
        self.answers: list[Answer | None] = []
        self.leases: list[Lease | None] = []
        self.seen: list[Change] = []
        self.gaps = 0
        self.rolled_back = False

    def write(self, *operations: Put | Delete, given: tuple[Compare, ...] = (), lost: bool = False) -> Answer | None:
        self.etcd.send(
            self.client, Transaction(conditions=given, operations=operations), self.answers.append, lost=lost
        )
        self.loop.run(self.loop.now + 3.0)
        return self.answers[-1]

    def lease(self, ttl: float) -> Lease:
        self.etcd.grant(self.client, ttl, self.leases.append)
        self.loop.run(self.loop.now + 0.1)
        lease = self.leases[-1]
        assert lease is not None
        return lease

    def watch(self) -> None:
        log = self.etcd.store.log("roll")
        self.etcd.watch(self.client, "roll", len(log), self.etcd.store.revision, self.seen.extend, self._gap)

    def _gap(self, rolled_back: bool) -> None:
        self.gaps += 1
        self.rolled_back = rolled_back

    def reach(self, there: bool) -> None:
        self.client.reaches = there
        if there:
            for watch in list(self.client.watches.values()):
                self.etcd.resume(watch)


def test_a_transaction_runs_all_operations_or_none() -> None:
    """If its condition fails nothing changes; all its changes have one revision."""
    bench = Bench()
    other = ROOT + "roll/members/b@1"
    assert bench.write(Put(KEY, b"1"), Put(other, b"1"), given=(Compare.absent(KEY),)) == (True, 2)
    assert bench.write(Put(KEY, b"2"), Delete(other), given=(Compare.mod_revision(KEY, 7),)) == (False, 2)
    assert bench.write(Put(KEY, b"2"), Delete(other), given=(Compare.mod_revision(KEY, 2),)) == (True, 3)
    item = bench.etcd.store.get(KEY)
    assert item is not None
    assert (item.value, item.create_revision, item.mod_revision, item.version) == (b"2", 2, 3, 2)
    assert bench.etcd.store.get(other) is None


def test_a_write_whose_answer_is_lost_is_applied() -> None:
    """No answer comes, and the key is there."""
    bench = Bench()
    assert bench.write(Put(KEY, b"1"), lost=True) is None
    assert bench.etcd.store.get(KEY) is not None


def test_a_lease_that_is_not_renewed_expires_with_its_keys() -> None:
    """It lives as long as its owner reaches etcd plus a time to live; etcd looks every half second."""
    bench = Bench()
    lease = bench.lease(3.0)
    bench.write(Put(KEY, b"1", lease.id))
    bench.loop.run(20.0)
    assert bench.etcd.store.get(KEY) is not None
    bench.watch()
    bench.etcd.lapse(lease)
    bench.loop.run(22.0)
    assert bench.etcd.store.get(KEY) is not None
    bench.loop.run(23.0 + EXPIRY)
    assert bench.etcd.store.get(KEY) is None
    assert [change.item for change in bench.seen] == [None]
    assert bench.write(Put(KEY, b"1", lease.id)) == (False, -1)


def test_an_etcd_election_extends_every_lease() -> None:
    """Their time to live begins anew."""
    bench = Bench()
    lease = bench.lease(3.0)
    bench.write(Put(KEY, b"1", lease.id))
    bench.etcd.lapse(lease)
    bench.loop.run(bench.loop.now + 1.0)
    bench.etcd.elect(1.0)
    bench.loop.run(bench.loop.now + 3.5)
    assert bench.etcd.store.get(KEY) is not None
    bench.loop.run(bench.loop.now + 1.0)
    assert bench.etcd.store.get(KEY) is None


def test_a_watch_resumes_where_it_was() -> None:
    """What happened while its client was cut off arrives afterwards, in order, and once."""
    bench = Bench()
    bench.watch()
    bench.write(Put(KEY, b"1"))
    bench.reach(False)
    other = Client(server=1)
    for value in (b"2", b"3"):
        bench.etcd.send(other, Transaction(conditions=(), operations=(Put(KEY, value),)), bench.answers.append)
        bench.loop.run(bench.loop.now + 1.0)
    assert len(bench.seen) == 1
    bench.reach(True)
    bench.loop.run(bench.loop.now + 1.0)
    assert [change.item.value for change in bench.seen if change.item] == [b"1", b"2", b"3"]
    assert bench.gaps == 0


def test_a_watch_behind_a_compaction_must_list_again() -> None:
    """It is informed, and delivers nothing more."""
    bench = Bench()
    bench.watch()
    bench.reach(False)
    other = Client(server=1)
    bench.etcd.send(other, Transaction(conditions=(), operations=(Put(KEY, b"1"),)), bench.answers.append)
    bench.loop.run(bench.loop.now + 1.0)
    bench.etcd.compact()
    bench.reach(True)
    bench.loop.run(bench.loop.now + 1.0)
    assert bench.seen == []
    assert bench.gaps == 1


def test_a_history_that_is_forgotten_is_missed_by_no_watch_but_one_behind_it() -> None:
    """The keys stay; one that was away lists again, one that was there delivers what comes next."""
    away, there = Bench(), Bench()
    away.etcd = there.etcd
    away.loop = there.loop
    away.watch()
    there.watch()
    away.reach(False)
    there.write(Put(KEY, b"1"))
    there.loop.run(there.loop.now + 100.0)
    there.etcd.forget(60.0)
    assert there.etcd.store.log("roll").between(0, 1) == []
    assert there.etcd.store.get(KEY) is not None
    there.write(Put(KEY, b"2"))
    away.reach(True)
    there.loop.run(there.loop.now + 1.0)
    assert [change.item.value for change in there.seen if change.item] == [b"1", b"2"]
    assert (there.gaps, away.gaps, away.seen) == (0, 1, [])


def test_watchers_share_the_links_of_their_etcd_members() -> None:
    """A large value reaches three hundred watchers no sooner than the etcd members can send it."""
    bench = Bench()
    value = b"x" * 1_000_000
    arrived: list[float] = []
    for server in range(300):
        bench.etcd.watch(
            Client(server=server),
            "roll",
            0,
            1,
            lambda changes: arrived.append(bench.loop.now),
            lambda rolled_back: None,
        )
    began = bench.loop.now
    bench.write(Put(KEY, value))
    assert len(arrived) == 300
    assert arrived[-1] - began > 100 * len(value) / Speeds().bandwidth


def test_a_rolled_back_etcd_has_its_former_keys_leases_and_revisions() -> None:
    """Newer keys are gone, deleted ones are back, and a watch is informed that it must list again."""
    bench = Bench()
    kept = bench.lease(5.0)
    bench.write(Put(KEY, b"1"), Put(KEY + "2", b"1", kept.id))
    then, revision = bench.loop.now, bench.etcd.store.revision
    bench.write(Put(KEY, b"2"), Put(KEY + "3", b"1"), Delete(KEY + "2"))
    bench.watch()
    bench.etcd.up = False
    bench.reach(False)
    bench.etcd.roll_back(then)
    bench.etcd.up = True
    bench.reach(True)
    store = bench.etcd.store
    assert store.revision == revision
    held = [store.get(KEY + name) for name in ("", "2", "3")]
    assert [item.value if item else None for item in held] == [b"1", b"1", None]
    assert (bench.gaps, bench.rolled_back) == (1, True)

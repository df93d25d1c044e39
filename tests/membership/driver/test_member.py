"""Members against a real etcd: several in one process, with simulated trainers and everything else real."""

from __future__ import annotations

import gc
import json
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from chaos.servers.etcd import EtcdServer
from chaos.simulation.standstills import At, stall
from elastic3d import etcd_keys as keys
from elastic3d.clock import SYSTEM
from elastic3d.etcd import EtcdClient, Put
from elastic3d.membership import actions as acts
from elastic3d.membership import events as e
from elastic3d.membership.driver.ended import end_seen, last_end
from elastic3d.membership.policy import Policy
from elastic3d.membership.records import SCHEMA, Drain, End, LastEnd, Out, Tomb, decode, encode, encode_change
from elastic3d.membership.stalls import Verdict
from elastic3d.values import Cause, Generation, ModelProfile
from tests.membership import crew
from tests.membership.crew import PROFILE, Hand, in_training, wait

pytestmark = pytest.mark.etcd

POLICY = replace(crew.POLICY, flaps=0)


class Job:
    """The members of one run id."""

    def __init__(self, etcd: EtcdServer, policy: Policy = POLICY) -> None:
        self.etcd, self.policy = etcd, policy
        self.root = f"/test/{secrets.token_hex(4)}/"
        self.all: dict[str, Hand] = {}
        self.client = EtcdClient(etcd.endpoint)
        self.leases = set(self.client.leases())

    def start(self, *names: str, profile: ModelProfile = PROFILE, labels: dict[str, str] | None = None) -> None:
        """Start members; the first named is there first."""
        for at, name in enumerate(names):
            self.all[name] = Hand(self._connect, self.root, name, self.policy, profile, labels=labels)
            if at < len(names) - 1:
                wait(lambda name=name: any(key.startswith(f"roll/members/{name}@") for key in self.records()), 10)

    def _connect(self) -> EtcdClient:
        return EtcdClient(self.etcd.endpoint)

    def close(self) -> None:
        for one in self.all.values():
            one.close()
        self.client.close()

    def worlds(self) -> set[tuple[int, str]]:
        """Return the running generations as (number, names in rank order), over all members."""
        running = [one.running for one in self.all.values() if one.running is not None]
        return {(g.number, "".join(node.name for node in g.nodes)) for g in running}

    def trains(self, names: str, number: int, seconds: float) -> None:
        """Wait until exactly these nodes run this generation."""

        def there() -> bool:
            run = {name for name, one in self.all.items() if one.running is not None}
            return self.worlds() == {(number, names)} and run == set(names)

        wait(there, seconds, lambda: f"{self.worlds()}, wanted {number} {names}")

    def registered(self) -> str:
        """Return the names of members whose key stands, and "*" if somebody leads."""
        keys = self.records()
        names = [key.removeprefix("roll/members/").partition("@")[0] for key in keys if key.startswith("roll/members/")]
        return "".join(names) + "*" * ("board/leader" in keys)

    def leader(self) -> Hand | None:
        """Return the member that leads; None if it is none of these."""
        claim = self.records().get("board/leader")
        return self.all.get(json.loads(claim)["name"]) if claim is not None else None

    def records(self) -> dict[str, bytes]:
        """Return the records in etcd."""
        items, _revision = self.client.range(self.root)
        return {item.key.removeprefix(self.root): item.value for item in items}


@pytest.fixture(scope="module")
def etcd() -> Iterator[EtcdServer]:
    """A server for all; a test that stops it resumes it."""
    with EtcdServer() as server:
        yield server


@pytest.fixture
def job(etcd: EtcdServer) -> Iterator[Job]:
    """A job of the test's own."""
    job = Job(etcd)
    yield job
    job.close()


def test_a_job_survives_a_death_a_join_and_a_leave(job: Job) -> None:
    """Form, lose a member, take one in, lose the leader, let one go: each change takes about a second or less.

    A dead member is evicted long before its lease ends; one that left cleanly leaves no key and no lease behind.
    """
    job.start("a", "b", "c")
    job.trains("abc", 1, 5)
    job.all.pop("b").die()
    job.trains("ac", 2, 1.5)
    assert job.all["a"].running is not None
    assert job.all["a"].running.cause is Cause.DEATH
    job.start("d")
    job.trains("acd", 3, 3)
    job.all.pop("a").die()
    job.trains("cd", 4, 1.5)
    job.all.pop("d").leave()
    job.trains("c", 5, 2)
    assert job.all["c"].running is not None
    assert job.all["c"].running.cause is Cause.LEAVE
    assert not [key for key in job.records() if key.startswith("roll/") and "/d@" in key]
    assert [g.number for g in job.all["c"].went] == [1, 2, 3, 4, 5]
    assert job.all["c"].acted_on == {"elastic3d-member"}
    job.all.pop("c").leave()
    left = {key for key in job.records() if not key.startswith(("board/tombs/", "history/", "roll/flaps/"))}
    assert left == {"board/generation", "board/secret"}
    wait(lambda: set(job.client.leases()) <= job.leases, 5, lambda: "the dead ones' leases run out")


def test_a_clean_leave_leaves_no_lease(job: Job) -> None:
    """The lease is given back, and does not have to expire."""
    job.start("a", "b")
    job.trains("ab", 1, 5)
    job.all.pop("a").leave()
    job.all.pop("b").leave()
    assert set(job.client.leases()) <= job.leases


def test_members_survive_an_etcd_stopped_beyond_every_lease(job: Job) -> None:
    """Nobody is evicted: all register again when it resumes, and one of them leads."""
    job.start("a", "b", "c")
    job.trains("abc", 1, 5)
    job.etcd.pause()
    try:
        wait(lambda: all(one.heard[-1] is False for one in job.all.values()), 6)
        time.sleep(POLICY.lease + POLICY.grace)
        job.trains("abc", 1, 0.1)
    finally:
        job.etcd.resume()
    wait(lambda: job.registered() == "abc*", 6)
    time.sleep(POLICY.lease + POLICY.grace + 1)
    assert job.registered() == "abc*"
    job.trains("abc", 1, 0.1)
    job.all.pop("a").die()
    job.trains("bc", 2, 2)


def test_members_survive_a_restart_of_etcd() -> None:
    """The generation does not notice it, and later changes work."""
    with EtcdServer() as etcd:
        job = Job(etcd)
        try:
            job.start("a", "b")
            job.trains("ab", 1, 5)
            etcd.kill()
            time.sleep(1)
            etcd.restart()
            wait(lambda: all(one.heard[-1] for one in job.all.values()), 10)
            job.trains("ab", 1, 0.1)
            job.start("c")
            job.trains("abc", 2, 5)
        finally:
            job.close()


def test_members_survive_the_loss_of_all_leases(job: Job) -> None:
    """All are revoked at once: members and leader return, and the generation stays."""
    job.start("a", "b", "c")
    job.trains("abc", 1, 5)
    for lease in set(job.client.leases()) - job.leases:
        job.client.revoke(lease)
    wait(lambda: job.registered() == "abc*", 4)
    time.sleep(POLICY.lease + POLICY.grace + 1)
    job.trains("abc", 1, 0.1)


def test_garbage_under_other_names_does_no_harm(job: Job) -> None:
    """Malformed records and unknown kinds are ignored."""
    kinds = (
        "roll/members",
        "roll/reports",
        "roll/drains",
        "roll/quarantine",
        "roll/flaps",
        "board/tombs",
        "board/doubts",
    )
    for key in (*(f"{kind}/{name}" for kind in kinds for name in ("x", "x@1", "", "x/y")), "what/ever", "", "pulses/x"):
        job.client.put(job.root + key, b"\xff garbage")
    job.start("a", "b")
    job.trains("ab", 1, 5)
    a = job.all["a"].id
    for key in ("roll/members/y@1", f"roll/reports/{a}", f"board/tombs/{a}", f"board/doubts/{a}", "roll/drains/a"):
        job.client.put(job.root + key, b"{}")
    job.start("c")
    job.trains("abc", 2, 5)


@pytest.mark.parametrize("when", ["before", "while it runs"])
def test_a_generation_of_a_newer_schema_ends_the_member(job: Job, when: str) -> None:
    """It must be able to read what it obeys: it goes with the reason, and overwrites nothing."""
    newer = json.loads(encode(Generation(number=7, cause=Cause.START, nodes=())))
    value = json.dumps({**newer, "schema": SCHEMA + 1}).encode()
    if when == "before":
        job.client.put(job.root + "board/generation", value)
        job.start("a")
    else:
        job.start("a")
        job.trains("a", 1, 5)
        job.client.put(job.root + "board/generation", value)
    one = job.all["a"]
    wait(lambda: one.exit is not None, 5)
    assert one.exit is not None
    assert one.exit.failed
    assert "upgrade this node" in one.exit.detail
    assert one.acted_on == {"elastic3d-member"}
    time.sleep(0.5)
    assert job.records()["board/generation"] == value


def test_a_large_generation_is_published_as_a_change(job: Job) -> None:
    """Everybody watches a small record and newcomers list the whole one.

    If somebody garbles either it is written again.
    """
    for number, name in enumerate("ab", 1):
        job.start(name, labels={"host": name * 20_000})
        wait(lambda number=number: len(job.registered().strip("*")) == number, 10)
    job.trains("ab", 1, 10)
    assert "board.whole/generation" not in job.records()
    job.start("c")
    job.trains("abc", 2, 10)
    wait(lambda: "board/proposal" not in job.records(), 5)
    records = job.records()
    assert len(records["board/generation"]) < 2_000 < 20_000 < len(records["board.whole/generation"])
    assert "board.whole/proposal" not in records
    # It holds changes to a generation that nobody knows.
    sealed = decode(Generation, records["board.whole/generation"], "board/generation")
    known, other = replace(sealed, number=3), replace(sealed, nodes=sealed.nodes[::-1])
    change, whole = encode_change(known, other), encode(known)
    key, beside = job.root + "board/generation", job.root + "board.whole/generation"
    job.client.txn([], [Put(key, change), Put(beside, whole)], idempotent=True)
    job.trains("abc", 3, 10)
    job.client.put(key, b"garbage")
    job.client.delete(beside)
    job.start("d")
    job.trains("abcd", 4, 10)
    job.all.pop("b").die()
    job.trains("acd", 5, 10)
    # Present members no longer need it; newcomers read it.
    job.client.delete(beside)
    job.start("e")
    job.trains("acde", 6, 10)


def test_another_job_under_the_same_id_is_refused(job: Job) -> None:
    """A node with another model is told why and goes; the job does not notice."""
    job.start("a", "b")
    job.trains("ab", 1, 5)
    job.start("x", profile=replace(PROFILE, digest="another"))
    wait(lambda: job.all["x"].exit is not None, 3)
    stranger = job.all.pop("x")
    stranger.close()
    assert stranger.exit is not None
    assert stranger.exit.failed
    assert "choose another --rdzv-id" in stranger.exit.detail
    time.sleep(0.5)
    job.trains("ab", 1, 0.1)
    assert job.all["a"].went == job.all["a"].went[:1]


def test_the_id_of_an_ended_job_can_be_used_again(job: Job) -> None:
    """All end well, the id is free at once, and its numbers go on."""
    job.start("a", "b")
    job.trains("ab", 1, 5)
    for one in job.all.values():
        assert one.running is not None
        one.member.tell(e.MainFinished(key=one.running.key))
    wait(lambda: all(one.exit is not None for one in job.all.values()), 3)
    assert [one.exit for one in job.all.values()] == [acts.Exit(failed=False, detail="")] * 2
    # One is started again before the last of the old ones is gone.
    old = list(job.all.values())
    old[0].close()
    threading.Timer(0.5, old[1].close).start()
    job.start("a", "c")
    wait(lambda: all(job.all[name].running is not None for name in "ac"), 3, lambda: str(job.worlds()))
    assert job.worlds() in ({(2, "ac")}, {(2, "ca")})
    assert job.all["a"].running is not None
    assert job.all["a"].running.cause is Cause.START


def test_a_late_node_of_an_ended_job_does_not_start_a_new_job(job: Job) -> None:
    """It was started while the job ran, and was slow: it is done like the others.

    One started later begins a new job.
    """
    job.start("a")
    job.trains("a", 1, 5)
    seen = end_seen(job.client, job.root, time.monotonic(), SYSTEM)
    assert seen == 0
    one = job.all.pop("a")
    assert one.running is not None
    one.member.tell(e.MainFinished(key=one.running.key))
    wait(lambda: one.exit is not None, 5)
    one.close()
    before = job.records()
    late = Hand(job._connect, job.root, "late", job.policy, end_seen=seen)
    assert late.exit == acts.Exit(failed=False, detail="the job ended before this node joined it")
    late.close()
    assert job.records() == before
    job.all["b"] = Hand(
        job._connect, job.root, "b", job.policy, end_seen=end_seen(job.client, job.root, time.monotonic(), SYSTEM)
    )
    job.trains("b", 2, 10)


def test_a_node_that_reads_etcd_only_after_the_end_knows_that_it_was_started_before(job: Job) -> None:
    """It was started anew while the job ran, and could not read for a while: it must not begin the job again.

    One started after the end does, and so does one where etcd's leader has changed since: nobody knows then how long
    ago the end was. How the job ended can be read for a while even so.
    """
    job.start("a")
    job.trains("a", 1, 5)
    one = job.all.pop("a")
    assert one.running is not None
    one.member.tell(e.MainFinished(key=one.running.key))
    wait(lambda: one.exit is not None, 5)
    one.close()
    end, last = (job.client.get(job.root + key) for key in (keys.END, keys.LAST_END))
    assert end is not None
    assert last is not None
    before, after = time.monotonic() - 30.0, time.monotonic()
    assert end_seen(job.client, job.root, after, SYSTEM) == end.mod_revision
    seen = end_seen(job.client, job.root, before, SYSTEM)
    assert seen == 0
    late = Hand(job._connect, job.root, "late", job.policy, end_seen=seen)
    assert late.exit == acts.Exit(failed=False, detail="the job ended before this node joined it")
    late.close()
    job.all["b"] = Hand(job._connect, job.root, "b", job.policy, end_seen=end.mod_revision)
    job.trains("b", 2, 10)
    assert last_end(job.client, job.root) == (End(failed=False), end.mod_revision)
    record = replace(decode(LastEnd, last.value, last.key), term=1_000_000)
    done = job.client.txn([], [Put(end.key, end.value), Put(last.key, encode(record), last.lease)])
    assert end_seen(job.client, job.root, before, SYSTEM) == done.revision


def test_nodes_may_follow_those_that_were_all_told_to_leave(job: Job) -> None:
    """One that was started to take the place of the last joins after its end, and begins the job anew."""
    job.start("a")
    job.trains("a", 1, 5)
    seen = end_seen(job.client, job.root, time.monotonic(), SYSTEM)
    one = job.all.pop("a")
    job.client.put(job.root + keys.drain("a"), encode(Drain(seconds=3)))
    wait(lambda: one.exit is not None, 5)
    one.close()
    job.all["b"] = Hand(job._connect, job.root, "b", job.policy, end_seen=seen)
    job.trains("b", 2, 10)


def test_errors_without_progress_end_the_job(job: Job) -> None:
    """The user's code fails on every try: after the last, all go with its error."""
    job.start("a", "b")
    for number in range(1, POLICY.tries):
        job.trains("ab", number, 5)
        running = job.all["b"].running
        assert running is not None
        job.all["b"].member.tell(e.TrainerFailed(key=running.key, detail="ValueError: mine", error=True))
        wait(lambda number=number: job.worlds() != {(number, "ab")}, 3)
    job.trains("ab", POLICY.tries, 5)
    running = job.all["a"].running
    assert running is not None
    job.all["a"].member.tell(e.TrainerFailed(key=running.key, detail="ValueError: mine", error=True))
    wait(lambda: all(one.exit is not None for one in job.all.values()), 3)
    assert {one.exit.detail for one in job.all.values() if one.exit} == {"ValueError: mine"}


def test_ranks_that_stand_still_end_their_generation(job: Job) -> None:
    """Each node says so under its lease; the leader seals the next one, with its verdict, and nothing stays behind."""
    job.start("a", "b", "c")
    job.trains("abc", 1, 10)
    for name, one in job.all.items():
        assert one.running is not None
        said = stall(one.running, one.record.node, At.FAULT if name == "b" else At.WAIT)
        one.member.tell(e.RanksSilent(stall=said))
    first = job.all["a"].went[0]
    job.trains("abc", 2, 20)
    records = job.records()
    assert [one.went[-1].cause for one in job.all.values()] == [Cause.STUCK] * 3
    verdict = decode(Verdict, records[keys.verdict(first.key)], "the verdict")
    assert (verdict.key, verdict.culprits) == (first.key, (job.all["b"].id,))
    wait(lambda: not any(key.startswith(keys.STALLS) for key in job.records()), 10)
    # They say it again, and one of them moves in time: nothing more happens.
    for one in job.all.values():
        assert one.running is not None
        one.member.tell(e.RanksSilent(stall=stall(one.running, one.record.node, At.WAIT)))
    wait(lambda: sum(key.startswith(keys.STALLS) for key in job.records()) == 3, 10)
    job.all["b"].member.tell(e.RanksMoving(key=verdict.key))
    assert job.all["c"].running is not None
    job.all["c"].member.tell(e.RanksMoving(key=job.all["c"].running.key))
    wait(lambda: sum(key.startswith(keys.STALLS) for key in job.records()) == 2, 10)


def test_only_the_leader_watches_the_roll(job: Job) -> None:
    """Followers receive nothing that everybody writes, however many join; a new leader starts to watch it."""
    job.start("a", "b", "c")
    job.trains("abc", 1, 5)
    leader = job.leader()
    assert leader is not None
    followers = [one for one in job.all.values() if one is not leader]
    assert leader.of_roster()
    assert not [event for one in followers for event in one.of_roster()]
    job.start("d")
    job.trains("abcd", 2, 5)
    assert not [event for one in followers for event in one.of_roster()]
    job.all.pop(leader.name).die()
    wait(lambda: job.leader() is not None, 3)
    heir = job.leader()
    assert heir is not None
    names = "abcd".replace(leader.name, "")
    job.trains(names, 3, 3)
    assert heir.of_roster()
    assert not [event for one in job.all.values() if one is not heir for event in one.of_roster()]


def test_a_full_python_garbage_collection_is_short(job: Job) -> None:
    """Objects imported before a member starts are exempt: its heartbeats would wait for the end of the collection."""
    ballast = [[] for _each in range(300_000)]
    gc.unfreeze()
    job.start("a")
    try:
        assert len(gc.get_objects()) < len(ballast)
    finally:
        gc.unfreeze()


def test_a_member_survives_its_revoked_lease(job: Job) -> None:
    """Within about a second it is back under its identity, and the generation stays."""
    job.start("a")
    job.trains("a", 1, 5)
    before = set(job.client.leases())
    job.start("b")
    job.trains("ab", 2, 5)
    (lease,) = set(job.client.leases()) - before
    job.client.revoke(lease)

    def back() -> bool:
        item = job.client.get(f"{job.root}roll/members/{job.all['b'].id}")
        return item is not None and item.lease != lease

    wait(back, 2.5)
    assert job.registered() == "ab*"
    time.sleep(POLICY.lease + POLICY.grace + 0.5)
    job.trains("ab", 2, 0.1)
    assert len(job.all["b"].went) == 1


def test_a_deleted_member_key_is_written_again(job: Job) -> None:
    """The leader's and a follower's: the follower, who does not watch the roster, finds out by its pulse."""
    job.start("a", "b")
    job.trains("ab", 1, 5)
    for one in job.all.values():
        job.client.delete(f"{job.root}roll/members/{one.id}")
    wait(lambda: job.registered() == "ab*", 7)
    time.sleep(POLICY.lease + POLICY.grace + 0.5)
    job.trains("ab", 1, 0.1)


def test_an_evicted_node_rejoins_as_a_newcomer(job: Job) -> None:
    """Somebody wrote its tomb: it stops, its links and client serve its next incarnation, and the others admit it.

    Closing the fenced incarnation leaves nothing of it but the tomb.
    """
    job.start("a", "b", "c")
    job.trains("abc", 1, 5)
    b = job.all["b"]
    first = b.id
    tomb = Tomb(incarnation=b.record.node.incarnation, how=Out.DEAD, detail="the test says so", by="somebody")
    job.client.put(f"{job.root}board/tombs/{first}", encode(tomb))
    wait(lambda: b.exit is not None, 2)
    assert b.exit == acts.Exit(failed=True, detail="the test says so", rejoin=True)
    wait(lambda: job.worlds() == {(2, "ac")}, 3, lambda: str(job.worlds()))
    b.rejoin()
    assert b.id != first
    wait(lambda: job.worlds() == {(3, "acb")}, 4, lambda: str(job.worlds()))
    assert {key for key in job.records() if first in key and not key.startswith("roll/flaps")} == {
        f"board/tombs/{first}"
    }
    assert {one.exit for one in job.all.values()} == {None}


def test_a_second_process_under_a_name_replaces_the_first(job: Job) -> None:
    """The older one is out for good; the job goes on with the newer."""
    job.start("a", "b")
    job.trains("ab", 1, 5)
    old = job.all.pop("b")
    job.start("b")
    try:
        wait(lambda: old.exit is not None, 3)
        assert old.exit is not None
        assert not old.exit.rejoin
        assert "another process registered as node b" in old.exit.detail
        wait(lambda: job.worlds() == {(2, "ab")}, 4, lambda: str(job.worlds()))
    finally:
        old.close()


def test_leftovers_of_an_ended_job_go_when_the_next_begins(job: Job) -> None:
    """Its history is readable until then; no tomb, doubt, drain or history of it reaches the new job."""
    job.start("a")
    job.trains("a", 1, 5)
    one = job.all.pop("a")
    assert one.running is not None
    one.member.tell(e.MainFinished(key=one.running.key))
    wait(lambda: one.exit is not None, 3)
    one.close()
    assert [key for key in job.records() if key.startswith("history/")]
    job.client.put(job.root + "roll/drains/a", encode(Drain(seconds=1)))
    job.client.put(job.root + "board/tombs/a@0", encode(Tomb(incarnation="0", how=Out.LEFT)))
    job.start("a")
    job.trains("a", 2, 5)
    keys = job.records().keys()
    assert not keys & {"roll/drains/a", "board/tombs/a@0", "board/end"}
    assert [key.partition(".")[0] for key in keys if key.startswith("history/")] == ["history/0000000002"]


def test_closing_without_etcd_does_not_hang() -> None:
    """A node told to go during an etcd outage goes, and leaves its keys to expire with the lease."""
    with EtcdServer() as etcd:
        job = Job(etcd)
        try:
            job.start("a", "b")
            job.trains("ab", 1, 5)
            etcd.pause()
            wait(lambda: not job.all["a"].heard[-1], 8)
            began = time.monotonic()
            job.all.pop("a").leave()
            assert time.monotonic() - began < 6
            etcd.resume()
            job.trains("b", 2, 8)
        finally:
            job.close()


def test_a_failing_core_ends_its_member(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    """It must not go on looking alive: it exits, and says on stderr where it failed."""
    job.start("a")
    job.trains("a", 1, 5)
    job.all["a"].member.tell(e.Listed(tier=e.Tier.BOARD, items=None, revision=10**9))  # type: ignore[arg-type]
    wait(lambda: job.all["a"].exit is not None, 2)
    assert job.all["a"].exit is not None
    assert job.all["a"].exit.failed
    assert "the membership failed: TypeError" in job.all["a"].exit.detail
    assert "Traceback" in capsys.readouterr().err


def test_a_refusal_seen_by_one_node_evicts_nobody(etcd: EtcdServer) -> None:
    """Somebody else answers a in c's place and refuses: b still hears c, and it stays.

    When c does end, it is out at once.
    """
    with in_training(lambda: EtcdClient(etcd.endpoint), POLICY) as there, socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        peers = tuple(
            acts.RingPeer(id=one.id, address="127.0.0.1", port=port)
            for one, port in ((there.all["b"], there.all["b"].links.port), (there.all["c"], held.getsockname()[1]))
        )
        a = there.all["a"]
        a.links.watch(acts.WatchPeers(peers=peers, expected=tuple(peer.id for peer in peers), near=peers))
        wait(lambda: a.refused, 10)
        assert f"but other nodes reach {there.all['c'].id} there" in a.refused[0].reason
        there.goes_on("abc", 1, POLICY.confirm + POLICY.doubt + 1)
        there.all.pop("c").die()
        there.trains("ab", 2, 10)
        assert "refuses the heartbeat connection, and " in there.all["a"].went[-1].detail

"""Which members cannot be reached, tried with real sockets; and who stands aside for it, as a function of pairs."""

from __future__ import annotations

import socket

from hypothesis import given
from hypothesis import strategies as st

from elastic3d.membership import actions as acts
from elastic3d.membership import events as e
from elastic3d.membership.driver.probing import probe
from elastic3d.membership.machine.alarm import Alarm
from elastic3d.membership.machine.apart import apart
from elastic3d.membership.machine.reach import EVERY, MEETING, MOST, SELDOM, STANDING, STEPS, TWICE, Reach
from elastic3d.membership.machine.trainers import Trainers, TrainersPhase
from elastic3d.membership.machine.view import View
from elastic3d.membership.policy import Policy
from elastic3d.membership.records import MemberRecord
from elastic3d.values import Cause, Generation, Node, Slot

POLICY = Policy(minimum=1, maximum=1000)
PAIRS = st.sets(
    st.frozensets(st.integers(0, 12).map("n{:02d}".format), min_size=2, max_size=2), max_size=30
)  # fmt: skip


def place(id: str) -> tuple[int, int]:
    return (0, int(id[1:]))


@given(PAIRS)
def test_standing_aside_resolves_all_pairs_and_nothing_else(pairs: set[frozenset[str]]) -> None:
    """One of each pair stands aside, and everybody who does has a pair as the reason."""
    aside = apart(pairs, place)
    assert all(pair & aside.keys() for pair in pairs)
    assert all(others and all(frozenset((id, other)) in pairs for other in others) for id, others in aside.items())
    # In any order of the reports.
    assert apart(sorted(pairs, key=sorted, reverse=True), place) == aside


def test_the_least_connected_stands_aside_then_the_highest_rank() -> None:
    """A node that reaches nobody stands aside for all; of a single pair it is the higher rank."""
    star = {frozenset(("n00", f"n{at:02d}")) for at in range(1, 6)}
    assert apart(star, place) == {"n00": ("n01", "n02", "n03", "n04", "n05")}
    assert apart({frozenset(("n03", "n01"))}, place) == {"n03": ("n01",)}


def test_a_host_that_accepts_or_refuses_is_reachable_and_a_silent_one_is_not() -> None:
    """A listening port, a closed one, a full queue that drops connections, and an invalid address."""
    with (
        socket.create_server(("127.0.0.1", 0)) as open_one,
        socket.create_server(("127.0.0.1", 0), backlog=0) as full,
    ):
        closed = socket.create_server(("127.0.0.1", 0))
        refusing = closed.getsockname()[1]
        closed.close()
        fillers = []
        for _ in range(4):
            filler = socket.socket()
            filler.setblocking(False)
            filler.connect_ex(full.getsockname())
            fillers.append(filler)
        peers = (
            acts.RingPeer(id="open", address="127.0.0.1", port=open_one.getsockname()[1]),
            acts.RingPeer(id="refuses", address="127.0.0.1", port=refusing),
            acts.RingPeer(id="silent", address="127.0.0.1", port=full.getsockname()[1]),
            acts.RingPeer(id="nonsense", address="no address", port=1),
        )
        event = probe(peers, seconds=0.5)
        for filler in fillers:
            filler.close()
    assert event == e.Probed(reached=("open", "refuses", "nonsense"), failed=("silent",))


class Member:
    """A `Reach` in virtual time, beside trainers of one generation that is sealed at 0."""

    def __init__(self, nodes: int = 4) -> None:
        self.nodes = [node_of(f"n{at:04d}") for at in range(nodes)]
        self.formed = Generation(
            number=1, attempt=1, cause=Cause.START, nodes=tuple(self.nodes), spares=(), layout=None, leader="n0000"
        )
        self.view = View(MemberRecord(node=self.nodes[0]))
        self.view.apply(e.GenerationPut(generation=self.formed, revision=1), 0.0)
        self.trainers = Trainers(self.nodes[0].id)
        self.trainers.follow(self.view, [])
        self.reach = Reach(self.nodes[0].id)
        self.now = 0.0

    def runs(self) -> None:
        self.trainers.prepared(self.formed.key)
        self.trainers.follow(self.view, [])
        assert self.trainers.phase(self.formed.key) is TrainersPhase.RUNNING

    def until(self, now: float, failing: tuple[str, ...] = (), lost: str = "") -> list[tuple[float, acts.Action]]:
        """Let time pass, answering each probe; return the actions by time."""
        done = []
        while True:
            alarm = Alarm(self.now)
            for action in self.reach.follow(self.view, self.trainers, POLICY, lost, alarm):
                done.append((self.now, action))
                if isinstance(action, acts.Probe):
                    ids = [peer.id for peer in action.peers]
                    failed = tuple(id for id in ids if id in failing)
                    self.reach.probed(e.Probed(reached=tuple(set(ids) - set(failed)), failed=failed), self.now)
            alarm = Alarm(self.now)
            if not self.reach.follow(self.view, self.trainers, POLICY, lost, alarm):
                if alarm.next > now:
                    self.now = now
                    return done
                self.now = alarm.next


def node_of(name: str) -> Node:
    return Node(name=name, incarnation="i", address="h", slots=(Slot(tile_port=1),), heartbeat_port=7)


def tries(done: list[tuple[float, acts.Action]]) -> list[float]:
    return [at for at, action in done if isinstance(action, acts.Probe)]


def test_members_with_advancing_trainers_probe_nobody() -> None:
    """Steps every few seconds, however long each: probing starts after ten seconds, or thrice the longest step."""
    member = Member()
    member.runs()
    for step in range(1, 20):
        assert not tries(member.until(9.0 * step))
        member.reach.stepped(member.formed, member.now)
    since = member.now
    assert tries(member.until(since + 100))[0] == since + STEPS * 9.0


def test_members_with_idle_trainers_probe_all_less_and_less_often() -> None:
    """While they build and while they run; in the end everybody reachable is tried once a minute."""
    member = Member()
    first, second, *_, last = tries(member.until(1000.0))
    assert (first, second) == (MEETING, MEETING + EVERY)
    assert last > 1000 - 2 * SELDOM
    assert len(tries(member.until(2000.0))) < 20
    assert member.reach.unreachable == ()
    member.runs()
    assert tries(member.until(2100.0))[0] <= 2000.0 + SELDOM


def test_an_earlier_long_pause_does_not_delay_probing() -> None:
    """After an evaluation of an hour that reached everybody, a standstill is examined as soon as any other."""
    member = Member()
    member.runs()
    member.until(3600.0)
    member.reach.stepped(member.formed, member.now)
    member.until(3601.0)
    member.reach.stepped(member.formed, member.now)
    assert tries(member.until(3700.0))[0] == 3601.0 + STANDING


def test_a_single_node_probes_nobody() -> None:
    """There is nobody to reach."""
    member = Member(nodes=1)
    assert not tries(member.until(1000.0))


def test_a_peer_unreachable_twice_is_reported_until_it_is_stable() -> None:
    """It is not while it fails now and then; a step that needs it proves at once that all is well."""
    member = Member()
    member.runs()
    other = member.nodes[2].id
    member.until(30.0, failing=(other,))
    assert member.reach.unreachable == (other,)
    done = member.until(30.0 + POLICY.reach_again / 2)
    assert all(len(action.peers) >= 1 for _, action in done if isinstance(action, acts.Probe))
    member.until(member.now + 6.0, failing=(other,))
    failed_at = member.now
    member.until(failed_at + POLICY.reach_again - 1)
    assert member.reach.unreachable == (other,)
    member.until(failed_at + POLICY.reach_again + 2 * EVERY)
    assert member.reach.unreachable == ()
    member.until(member.now + 200.0, failing=(other,))
    assert member.reach.unreachable == (other,)
    member.reach.stepped(member.formed, member.now)
    assert member.reach.unreachable == ()


def test_a_member_that_lost_a_peer_probes_all_at_once() -> None:
    """Its trainers have ended, and unreachable peers are known before the generation is formed again."""
    member = Member()
    member.runs()
    member.until(1.0)
    other = member.nodes[1].id
    member.trainers.over(member.formed.key)
    done = member.until(3.0, failing=(other,), lost=member.formed.key)
    assert len(tries(done)) >= TWICE
    assert tries(done)[0] == 1.0
    assert member.reach.unreachable == (other,)


def test_a_dead_node_is_no_longer_reported() -> None:
    """Nor is one that left: the others know all there is to know."""
    member = Member()
    member.runs()
    other = member.nodes[1].id
    member.until(STANDING + 5, failing=(other,))
    assert member.reach.unreachable == (other,)
    member.view.tombs[other] = member.view.tombs.get(other)  # type: ignore[assignment]
    member.until(member.now + 1)
    assert member.reach.unreachable == ()


def test_a_large_job_probes_in_batches() -> None:
    """Never more than a set number of connections at once, and all peers in turn."""
    member = Member(nodes=500)
    done = member.until(100.0)
    asked = [action.peers for _, action in done if isinstance(action, acts.Probe)]
    assert all(0 < len(peers) <= MOST for peers in asked)
    assert {peer.id for peers in asked for peer in peers} == {node.id for node in member.nodes[1:]}

"""Nodes stopped, starved or cut off, each a process: out soon, back as newcomers, with no false alarm.

Times depend on how busy the machine is; they are printed, and only bounded loosely.
"""

from __future__ import annotations

import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from random import Random

import pytest

from chaos.machine.network import Network
from chaos.servers.etcd import EtcdServer
from elastic3d.membership.driver.links import SILENCE
from tests.membership.nodes import Nodes

pytestmark = [pytest.mark.etcd, pytest.mark.timeout(300)]

NAMES = tuple("abcde")


@pytest.fixture(scope="module")
def etcd() -> Iterator[EtcdServer]:
    """One server for all."""
    with EtcdServer() as server:
        yield server


@pytest.fixture
def nodes(etcd: EtcdServer) -> Iterator[Nodes]:
    """Members under a root of the test's own."""
    nodes = Nodes(etcd)
    yield nodes
    nodes.close()


def stop_and_wake(nodes: Nodes, victim: str) -> float:
    """Stop a node, wait until the others train without it, resume it, wait until it is back; return the first wait."""
    others = [name for name in nodes.all if name != victim]
    stopped = time.monotonic()
    nodes.all[victim].signal(signal.SIGSTOP)
    try:
        nodes.trains(others, 10)
        took = max(nodes.all[name].went()[-1]["at"] for name in others) - stopped
        assert nodes.all[others[0]].went()[-1]["cause"] == "death"
    finally:
        nodes.all[victim].signal(signal.SIGCONT)
    nodes.trains([*others, victim], 15)
    return took


def test_a_stopped_node_is_evicted_and_rejoins(nodes: Nodes) -> None:
    """A follower and the leader: the others go on without it in about 1.5 s and name who did not hear it.

    Once resumed it stops its trainers, and is admitted under another incarnation.
    """
    nodes.start(*NAMES, maximum=len(NAMES))
    nodes.trains(NAMES, 30)
    leader, follower = NAMES[0], NAMES[3]
    for victim in (follower, leader):
        before = nodes.all[victim].incarnations()
        took = stop_and_wake(nodes, victim)
        print(f"out after {took:.2f} s")
        assert took < 4
        witness = next(one for one in nodes.all.values() if one.name != victim)
        evidence = next(what["detail"] for what in reversed(witness.went()) if victim not in what["names"])
        assert re.search(f"{victim}: (not heard by|cut off from)", evidence)
        (left,) = nodes.all[victim].exits()
        assert left["rejoin"]
        assert len(nodes.all[victim].incarnations()) == len(before) + 1
        assert all(not one.exits() for one in nodes.all.values() if one.name not in (follower, victim))


def test_a_stopped_node_of_two_is_evicted(nodes: Nodes) -> None:
    """There is no second witness: the stopped one is asked through etcd, and evicted when it does not answer."""
    nodes.start("a", "b", maximum=2)
    nodes.trains("ab", 30)
    took = stop_and_wake(nodes, "b")
    print(f"out after {took:.2f} s")
    assert took < 6
    assert not nodes.all["a"].exits()


def pauses(nodes: Nodes, count: int, seed: int, times: float = 1.0) -> None:
    """Stop one process after the other for 0.3 to 0.7 s, or so many times as long, with short moments between."""
    random = Random(seed)
    for _pause in range(count):
        victim = nodes.all[random.choice(list(nodes.all))]
        victim.signal(signal.SIGSTOP)
        time.sleep(times * random.uniform(0.3, 0.7))
        victim.signal(signal.SIGCONT)
        time.sleep(random.uniform(0.05, 0.3))


def undisturbed(nodes: Nodes, number: int) -> None:
    """Assert that nobody was evicted and nothing re-formed."""
    time.sleep(2)
    assert nodes.trains(NAMES, 1) == number
    assert not [what for one in nodes.all.values() for what in one.exits()]


def test_short_pauses_evict_nobody(nodes: Nodes) -> None:
    """Ten pauses of single processes, the leader among them.

    All of it takes twice as long as in a job: a busy machine adds to the pauses, too.
    """
    nodes.start(*NAMES, maximum=len(NAMES), silence=2 * SILENCE)
    number = nodes.trains(NAMES, 30)
    pauses(nodes, 10, seed=1, times=2.0)
    undisturbed(nodes, number)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_many_short_pauses_on_a_busy_machine_evict_nobody(nodes: Nodes) -> None:
    """Two hundred pauses, while one busy process per core runs."""
    nodes.start(*NAMES, maximum=len(NAMES))
    number = nodes.trains(NAMES, 60)
    load = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _core in range(os.cpu_count() or 1)]
    try:
        pauses(nodes, 200, seed=2)
    finally:
        for process in load:
            process.kill()
            process.wait()
    undisturbed(nodes, number)


@pytest.mark.slow
def test_a_stopped_node_is_evicted_within_two_seconds(nodes: Nodes) -> None:
    """The median of ten times."""
    nodes.start(*NAMES, maximum=len(NAMES))
    nodes.trains(NAMES, 30)
    took = [stop_and_wake(nodes, NAMES[at % len(NAMES)]) for at in range(10)]
    print(f"out after {statistics.median(took):.2f} s ({min(took):.2f} to {max(took):.2f})")
    assert statistics.median(took) < 2


@pytest.fixture
def network() -> Iterator[Network]:
    """Five hosts."""
    with ExitStack() as stack:
        try:
            made = stack.enter_context(Network())
            for name in NAMES:
                made.add(name)
        except OSError as error:
            pytest.skip(f"this machine lets us make no network namespaces: {error}")
        yield made


@contextmanager
def on_hosts(network: Network, names: Sequence[str]) -> Iterator[Nodes]:
    """These nodes, each on a host of its own, and their etcd beside them."""
    with EtcdServer(also=network.address) as etcd:
        port = etcd.endpoint.rpartition(":")[2]
        nodes = Nodes(etcd)
        try:
            nodes.start(
                *names,
                maximum=len(names),
                address=network.address_of,
                within=network.within,
                endpoint=f"{network.address}:{port}",
            )
            yield nodes
        finally:
            nodes.close()


@pytest.mark.netns
@pytest.mark.long
def test_a_node_stands_aside_while_a_one_way_link_is_lost(network: Network) -> None:
    """Only what b sends to c is lost: one of them is a spare until it arrives again, and nobody is evicted."""
    names = NAMES[:3]
    with on_hosts(network, names) as nodes:
        nodes.trains(names, 60)
        order = nodes.all["a"].went()[-1]["names"]
        stays, goes = (name for name in order if name != "a")
        network.unlink("b", "c")
        nodes.trains(["a", stays], 90)
        aside = nodes.all["a"].went()[-1]
        assert aside["cause"] == "quarantine"
        assert aside["detail"] == f"{goes} stands aside: no connection between it and {stays}"
        network.link("b", "c")
        nodes.trains(names, 90)
        assert not [what for one in nodes.all.values() for what in one.exits()]


@pytest.mark.netns
@pytest.mark.long
def test_a_node_that_refuses_one_peer_alone_is_not_evicted(network: Network) -> None:
    """All that b dials at c is refused on the way: c stays. A node that is killed then is evicted as usual."""
    names = NAMES[:4]
    with on_hosts(network, names) as nodes:
        number = nodes.trains(names, 60)
        order = nodes.all["a"].went()[-1]["names"]
        network.refuse(order[1], order[2])
        # Longer than it takes to report a silence and to ask about it through etcd, while the refusal is
        # repeated; shorter than idle trainers take to find a dead link between them.
        end = time.monotonic() + 5
        while time.monotonic() < end:
            assert nodes.trains(names, 1) == number
            time.sleep(0.1)
        assert not [what for one in nodes.all.values() for what in one.exits()]
        nodes.all[order[3]].signal(signal.SIGKILL)
        killed = time.monotonic()
        nodes.trains(order[:3], 20)
        took = max(nodes.all[name].went()[-1]["at"] for name in order[:3]) - killed
        print(f"out after {took:.2f} s")
        detail = nodes.all[order[0]].went()[-1]["detail"]
        assert re.search(f"{order[3]}: .* refuses .*, and . found the same", detail)


@pytest.mark.netns
def test_a_node_that_is_cut_off_is_evicted_and_rejoins(network: Network) -> None:
    """Its cable is pulled: no end of file, no refusal, no etcd. The others go on; once reconnected it is a newcomer.

    The same for the leader, whom no other leader can judge. Nobody else is evicted, and nobody twice.
    """
    with on_hosts(network, NAMES) as nodes:
        nodes.trains(NAMES, 30)
        for victim in (NAMES[3], NAMES[0]):
            others = [name for name in NAMES if name != victim]
            cut = time.monotonic()
            network.cut(victim)
            try:
                nodes.trains(others, 10)
                took = max(nodes.all[name].went()[-1]["at"] for name in others) - cut
                print(f"out after {took:.2f} s")
                assert took < 4
                time.sleep(3)
            finally:
                network.mend(victim)
            nodes.trains(NAMES, 30)
        assert {name: len(one.exits()) for name, one in nodes.all.items()} == {
            name: int(name in (NAMES[0], NAMES[3])) for name in NAMES
        }

"""Orders of faults as a keeper takes them: to which processes they go, and what is written before."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from chaos.machine.processes import wait_until
from chaos.servers.etcd import EtcdServer
from elastic3d import etcd_keys as keys
from elastic3d.etcd import EtcdClient, Put
from elastic3d.membership import events as e
from elastic3d.membership import reading
from elastic3d.membership.injection import FaultAnswer, FaultOrder, ordered
from elastic3d.membership.records import decode, encode
from elastic3d.rendezvous import agent
from elastic3d.worker.journal import Journal
from elastic3d.worker.keeper.injected import InjectedFaults, NodeProcesses, Work, work

ROOT = "/elastic3d/run/"
ME = "node0@x"

# Keepers 11 and 12 of agent 10 have templates 21 and 22, and these trainers 31 and 32.
PARENTS = {11: 10, 12: 10, 21: 11, 22: 12, 31: 21, 32: 22}
NODE = NodeProcesses(agent="10:77", keepers=(11, 12), trainers={0: 31, 1: 32})


def meant(word: str, there: NodeProcesses = NODE, parents: dict[int, int] = PARENTS, **given: Any) -> Work:
    return work(ordered(word, **given), there, lambda pid: parents.get(pid, 0))


@pytest.mark.parametrize(
    ("word", "given", "expected"),
    [
        ("kill", {}, Work(pids=(10,))),
        ("kill-keeper", {}, Work(pids=(11,))),
        ("kill-companion", {}, Work(pids=(12,))),
        ("kill-trainer", {}, Work(pids=(31,))),
        ("kill-trainer", {"slot": 1}, Work(pids=(32,))),
        ("kill-template", {"slot": 1}, Work(pids=(22,))),
        ("freeze", {}, Work(number=signal.SIGSTOP, pids=(31,))),
        ("pause", {"slot": 1}, Work(number=signal.SIGSTOP, pids=(32,))),
        ("stop", {}, Work(number=signal.SIGSTOP, pids=(10,), whole=True)),
    ],
)
def test_a_word_means_one_process_of_the_node(word: str, given: dict[str, int], expected: Work) -> None:
    """Or all of them."""
    assert meant(word, **given) == expected


def test_what_is_not_there_is_refused() -> None:
    """A spare has no trainers, a trainer may have just ended, a template may be gone, an agent unknown."""
    spare = replace(NODE, trainers={})
    assert meant("kill-trainer", spare).refused == "no trainer runs on slot 0 now"
    assert meant("kill-template", spare).refused == "no trainer runs on slot 0 now"
    assert meant("kill-trainer", NODE, {31: 1}).refused == "no trainer runs on slot 0 now"
    assert meant("kill-template", NODE, {**PARENTS, 31: 11}).refused == "the template of slot 0 is gone"
    assert meant("kill-trainer", NODE, {**PARENTS, 31: 11}) == Work(pids=(31,))
    assert meant("kill", replace(NODE, agent="")).refused == "this node's agent is not known"


@pytest.fixture(scope="module")
def server() -> Iterator[EtcdServer]:
    with EtcdServer() as running:
        yield running


@pytest.fixture
def client(server: EtcdServer) -> Iterator[EtcdClient]:
    with EtcdClient(server.endpoint) as client:
        client.delete(ROOT, prefix=True, idempotent=True)
        yield client


@contextmanager
def victim() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-I", "-S", "-c", "import signal; signal.pause()"])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


class Node:
    """A node whose agent is a process of the test's."""

    def __init__(self, client: EtcdClient, folder: Path, pid: int, *, allowed: bool = True) -> None:
        self.client, self.folder = client, folder
        self.journal = Journal(str(folder), "run", "node0")
        there = NodeProcesses(agent=agent.identity(pid), keepers=(os.getpid(),), trainers={})
        self.faults = InjectedFaults(client, allowed=allowed, slots=1, journal=self.journal, processes=lambda: there)

    def order(self, order: FaultOrder, *, id: str = ME, number: str = "1", leased: bool = True) -> e.FaultOrdered:
        """Write an order; return it as it is heard."""
        key = ROOT + keys.fault(id, number)
        self.client.txn([], [Put(key, encode(order), self.client.grant(30)[0] if leased else 0)], idempotent=True)
        item = self.client.get(key)
        assert item is not None
        event = reading.read(ROOT, item)
        assert isinstance(event, e.FaultOrdered)
        return event

    def answer(self, event: e.FaultOrdered) -> FaultAnswer | None:
        item = self.client.get(event.key)
        return None if item is None else decode(FaultOrder, item.value, item.key).answer

    def events(self) -> list[dict[str, Any]]:
        self.journal.flush(5.0)
        return [json.loads(line) for line in (self.folder / "node0-0.jsonl").read_text().splitlines()]

    def wrote(self, name: str) -> dict[str, Any]:
        assert wait_until(lambda: any(one["event"] == name for one in self.events()), 20.0)
        (found,) = [one for one in self.events() if one["event"] == name]
        return found


@pytest.mark.etcd
def test_an_order_is_answered_written_down_and_carried_out_once(client: EtcdClient, tmp_path: Path) -> None:
    """Though it is heard twice, as after a gap in the watch."""
    with victim() as process:
        node = Node(client, tmp_path, process.pid)
        event = node.order(ordered("kill", by="ann@there"))
        node.faults.heard(event, ME)
        node.faults.heard(event, ME)
        assert process.wait(20) == -signal.SIGKILL
        assert node.answer(event) == FaultAnswer()
        said = node.wrote("fault.injected")
        assert (said["fault"], said["pids"], said["by"]) == ("kill", [process.pid], "ann@there")
        node.journal.close()


@pytest.mark.etcd
def test_a_stop_lasts_for_its_time(client: EtcdClient, tmp_path: Path) -> None:
    """By a program of its own, which then ends."""
    with victim() as process:
        node = Node(client, tmp_path, process.pid)
        node.faults.heard(node.order(ordered("stop", seconds=0.5)), ME)
        assert os.WIFSTOPPED(os.waitpid(process.pid, os.WUNTRACED)[1])
        assert os.WIFCONTINUED(os.waitpid(process.pid, os.WCONTINUED)[1])
        node.journal.close()


@pytest.mark.etcd
@pytest.mark.parametrize(
    ("order", "leased", "why"),
    [
        (ordered("kill-trainer"), True, "no trainer runs on slot 0 now"),
        (ordered("kill-companion"), True, "no slot 1"),
        (FaultOrder(fault="set-on-fire"), True, "knows no fault"),
        (ordered("kill"), False, "no lease"),
    ],
)
def test_what_cannot_be_done_is_answered_with_the_reason(
    order: FaultOrder, leased: bool, why: str, client: EtcdClient, tmp_path: Path
) -> None:
    """The node's own events have it, too."""
    with victim() as process:
        node = Node(client, tmp_path, process.pid)
        event = node.order(order, leased=leased)
        node.faults.heard(event, ME)
        assert why in node.wrote("fault.refused")["detail"]
        answer = node.answer(event)
        assert answer is not None
        assert why in answer.refused
        assert process.poll() is None
        node.journal.close()


@pytest.mark.etcd
def test_an_order_that_was_withdrawn_is_not_carried_out(client: EtcdClient, tmp_path: Path) -> None:
    """Between the watch and the answer it may go."""
    with victim() as process:
        node = Node(client, tmp_path, process.pid)
        event = node.order(ordered("kill"))
        client.delete(event.key)
        node.faults.heard(event, ME)
        assert "does not stand any more" in node.wrote("fault.refused")["detail"]
        assert process.poll() is None
        node.journal.close()


@pytest.mark.etcd
def test_orders_for_others_are_not_this_nodes(client: EtcdClient, tmp_path: Path) -> None:
    """Another incarnation, another node, and an order that was answered."""
    with victim() as process:
        node = Node(client, tmp_path, process.pid)
        for number, id in enumerate(("node0@before", "node1@x")):
            node.faults.heard(node.order(ordered("kill"), id=id, number=str(number)), ME)
        node.faults.heard(node.order(replace(ordered("kill"), answer=FaultAnswer()), number="9"), ME)
        assert node.events() == []
        assert process.poll() is None
        node.journal.close()


@pytest.mark.etcd
def test_a_node_that_does_not_allow_it_says_so_once(client: EtcdClient, tmp_path: Path) -> None:
    """And does not answer: whoever writes past the check waits in vain."""
    with victim() as process:
        node = Node(client, tmp_path, process.pid, allowed=False)
        events = [node.order(ordered("kill", by="eve"), number=str(number)) for number in range(3)]
        for event in events:
            node.faults.heard(event, ME)
        said = node.wrote("fault.refused")
        assert said["by"] == "eve"
        assert "was not started with --rdzv-conf=chaos=allow" in said["detail"]
        assert [node.answer(event) for event in events] == [None, None, None]
        assert process.poll() is None
        node.journal.close()

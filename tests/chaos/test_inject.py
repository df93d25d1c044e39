"""`elastic3d chaos inject` against a real etcd: what it refuses before it writes, what it says, how it ends."""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
from click.testing import Result
from typer.testing import CliRunner

from chaos.servers.etcd import EtcdServer
from elastic3d import etcd_keys as keys
from elastic3d.cli import application
from elastic3d.clock import SYSTEM
from elastic3d.etcd import EtcdClient
from elastic3d.membership import events as e
from elastic3d.membership import reading
from elastic3d.membership.fault_orders import GivenOrder, take
from elastic3d.membership.injection import FaultAnswer
from elastic3d.membership.records import encode
from tests.membership.test_fault_orders import member

pytestmark = pytest.mark.etcd


@pytest.fixture(scope="module")
def server() -> Iterator[EtcdServer]:
    with EtcdServer() as running:
        yield running


@dataclass(frozen=True, slots=True)
class Run:
    """A run of nodes node0, which allows it, node1, which does not, and node2, in mode restart."""

    endpoint: str
    prefix: str
    client: EtcdClient

    @property
    def root(self) -> str:
        return f"/{self.prefix}/run/"

    def inject(self, *arguments: str) -> Result:
        where = ["--endpoint", self.endpoint, "--prefix", self.prefix]
        return CliRunner().invoke(application(), ["chaos", "inject", *arguments, *where])

    def orders(self) -> int:
        return len(self.client.range(self.root + keys.FAULTS)[0])


@pytest.fixture
def run(server: EtcdServer) -> Iterator[Run]:
    with EtcdClient(server.endpoint) as client:
        made = Run(server.endpoint, f"test/{secrets.token_hex(4)}", client)
        for record in (member("node0"), member("node1", chaos=False), member("node2", profile=None, chaos=False)):
            client.put(f"{made.root}{keys.member(record.node.id)}", encode(record), idempotent=True)
        yield made
        client.delete(f"/{made.prefix}/", prefix=True, idempotent=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["kill-trainor", "--node", "node0"], "no fault 'kill-trainor' can be injected into a live job; did you mean"),
        (["kill-trainer", "--node", "node7"], "there is no node 'node7' in this job; did you mean 'node"),
        (["kill-trainer", "--node", "node1"], "node1 was not started with --rdzv-conf=chaos=allow"),
        (["kill-trainer", "--node", "node2"], "node2 runs in mode restart"),
        (["kill-trainer", "--node", "node0", "--slot", "3"], "node0: there is no slot 3: the node has 1"),
        (["kill", "--node", "node0", "--slot", "0"], "kill is of the whole node"),
        (["stop", "--node", "node0", "--seconds", "0"], "more than 0 s"),
        (["kill-trainer", "--node", "node0", "--seconds", "2"], "does not last"),
    ],
)
def test_a_wrong_call_is_refused_before_anything_is_written(run: Run, arguments: list[str], message: str) -> None:
    """With exit code 2 and one line, which says what is wrong."""
    result = run.inject(*arguments, "--json")
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    (line,) = result.stderr.splitlines()
    assert message in line
    assert run.orders() == 0


def test_a_job_that_is_not_there_is_told_apart(run: Run) -> None:
    """Exit code 3."""
    result = run.inject("kill-trainer", "--node", "node0", "--id", "other")
    assert result.exit_code == 3
    assert "no job 'other'" in result.stderr


def test_an_etcd_that_is_not_there_is_named(refusing_port: Callable[[], int]) -> None:
    """Exit code 1, as with all other commands."""
    endpoint = f"127.0.0.1:{refusing_port()}"
    where = ["--endpoint", endpoint, "--id", "run"]
    result = CliRunner().invoke(application(), ["chaos", "inject", "kill", "--node", "node0", *where])
    assert result.exit_code == 1
    assert endpoint in result.stderr


def answering(run: Run, answer: FaultAnswer) -> threading.Thread:
    """Answer the next order, as a keeper does."""

    def keep() -> None:
        while not (items := run.client.range(run.root + keys.FAULTS)[0]):
            SYSTEM.sleep(0.02)
        event = reading.read(run.root, items[0])
        assert isinstance(event, e.FaultOrdered)
        given = GivenOrder(node=event.id, key=event.key, revision=event.revision, lease=event.lease, order=event.order)
        take(run.client, given, answer)

    thread = threading.Thread(target=keep)
    thread.start()
    return thread


@pytest.mark.parametrize("as_json", [True, False])
def test_it_returns_once_the_node_does_it(run: Run, as_json: bool) -> None:
    """stdout has the result, stderr the event of the order; nothing stays in etcd."""
    keeper = answering(run, FaultAnswer())
    result = run.inject("pause", "--node", "node0", "--seconds", "2", *(["--json"] if as_json else []))
    keeper.join()
    assert result.exit_code == 0, result.output
    assert "fault.ordered fault=pause seconds=2.0" in result.stderr
    if as_json:
        document = json.loads(result.stdout)
        assert document.pop("by")
        assert document == {
            "schema": 1,
            "run_id": "run",
            "node": "node0",
            "incarnation": "x",
            "fault": "pause",
            "slot": 0,
            "seconds": 2.0,
        }
    else:
        assert "node0 does it: pause of slot 0 for 2 s" in result.stdout
    assert run.orders() == 0


def test_a_nodes_refusal_ends_it(run: Run) -> None:
    """With exit code 2, and the node's own words."""
    keeper = answering(run, FaultAnswer(refused="no trainer runs on slot 0 now"))
    result = run.inject("kill-trainer", "--node", "node0")
    keeper.join()
    assert result.exit_code == 2
    assert "node0 refuses: no trainer runs on slot 0 now" in result.stderr

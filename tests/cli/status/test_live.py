"""Node commands, and what status shows of them, on a live job: real members and a real etcd, simulated trainers."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from chaos.servers.etcd import EtcdServer
from elastic3d.cli import application
from elastic3d.etcd import EtcdClient
from elastic3d.membership.policy import Policy
from elastic3d.membership.records import Pulse
from elastic3d.values import Generation
from tests.membership.crew import Hand

pytestmark = pytest.mark.etcd

POLICY = Policy(minimum=1, maximum=3, lease=2, grace=1, first_gather=2.0, gather=0.1, orphan=2)


def stepping(running: Generation | None) -> Pulse:
    """Return the pulse of a member that has made seven steps."""
    number = running.number if running is not None else 0
    return Pulse(state="active", generation=number, every=0.0, step=7, step_seconds=0.5)


class Job:
    """Members of one run id, of which three train and one waits, and a command line for that job."""

    def __init__(self, endpoint: str) -> None:
        self.prefix = f"live/{secrets.token_hex(4)}"
        self.arguments = ["--endpoint", endpoint, "--prefix", self.prefix]
        root = f"/{self.prefix}/gpt-1b/"
        self.all = {name: Hand(lambda: EtcdClient(endpoint), root, name, POLICY, pulse=stepping) for name in "abcd"}

    def run(self, *arguments: str) -> Result:
        result = CliRunner().invoke(application(), [*arguments, *self.arguments], env={"COLUMNS": "100"})
        assert result.exit_code == 0, result.output
        return result

    def status(self) -> Any:
        return json.loads(self.run("status", "--json").stdout)

    def until(self, number: int, condition: Callable[[dict[str, Any], dict[str, str]], bool]) -> Any:
        """Wait until `condition` holds of the status and node states, in generation `number` or later."""
        deadline = time.monotonic() + 60
        while True:
            shown = self.status()
            states = {node["name"]: node["state"] for node in shown["nodes"]}
            sealed = shown["generation"]
            if sealed is not None and sealed["number"] >= number and condition(shown, states):
                return shown
            assert time.monotonic() < deadline, shown
            time.sleep(0.1)


@pytest.fixture
def job() -> Iterator[Job]:
    """A job of four nodes, of which three may train, that has formed."""
    with EtcdServer() as server:
        job = Job(server.endpoint)
        try:
            job.until(1, lambda shown, states: len(states) == 4 and len(shown["generation"]["nodes"]) == 3)
            yield job
        finally:
            for one in job.all.values():
                one.close()


def test_a_drain_is_carried_out(job: Job) -> None:
    """The spare takes the place of the draining node, which is told to leave; status and events show the outcome."""
    before = job.status()
    active = before["generation"]["nodes"]
    (spare,) = {"a", "b", "c", "d"} - {*active}
    leaving = active[1]
    said = job.run("drain", leaving, "--deadline", "30s", "--reason", "new kernel", "--wait").stdout
    assert f"node {leaving} leaves generation {before['generation']['number']} at a step boundary within 30 s" in said
    assert f"node {leaving} left after" in said
    number = before["generation"]["number"] + 1
    after = job.until(number, lambda shown, states: shown["state"] == "training" and leaving not in states)
    assert after["generation"]["nodes"] == [spare if name == leaving else name for name in active]
    assert after["generation"]["cause"] == "drain"
    left = job.all[leaving].exit
    assert left is not None
    assert not left.failed
    shown = json.loads(job.run("events", "--json", "-n", "1").stdout)["generations"]
    assert (shown[0]["number"], shown[0]["cause"], shown[0]["left"]) == (number, "drain", [leaving])
    assert 0 <= time.time() - shown[0]["at"] < 60
    assert 0 <= after["generation"]["age"] < 60


def test_a_quarantine_is_carried_out_and_lifted(job: Job) -> None:
    """The machine's node is evicted, is shown with its reason, and may come back once it is released."""
    before = job.status()
    kept_out = before["generation"]["nodes"][2]
    job.run("quarantine", kept_out, "--for", "10m", "--reason", "ECC errors")
    number = before["generation"]["number"] + 1
    after = job.until(number, lambda shown, states: shown["state"] == "training" and states[kept_out] == "quarantined")
    assert kept_out not in after["generation"]["nodes"]
    (row,) = (node for node in after["nodes"] if node["name"] == kept_out)
    assert row["detail"].startswith("ECC errors (by ")
    assert 500 < row["seconds_left"] <= 600
    assert job.all[kept_out].exit is None
    job.run("release", kept_out)
    job.until(number, lambda shown, states: states[kept_out] in ("joining", "spare"))


def test_a_members_pulse_is_shown(job: Job) -> None:
    """With the figures that members write for people."""
    shown = job.until(1, lambda shown, states: shown["step"] == 7)
    assert shown["step_seconds"] == 0.5

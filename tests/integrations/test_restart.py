"""Scripts of Lightning and of Accelerate under torchrun in mode restart: a node is killed, and the other resumes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from chaos.servers.etcd import EtcdServer
from checkpointing import open_store, read_latest, verify
from elastic3d.integrations.newest import newest_step
from tests.rendezvous.agents import Agents

pytestmark = [pytest.mark.etcd, pytest.mark.gloo, pytest.mark.timeout(600), pytest.mark.long]

SCRIPTS = Path(__file__).parent / "scripts"
STEPS = 40


@pytest.fixture
def agents(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Agents]:
    """Agents under a run id of the test's own."""
    with EtcdServer() as etcd, Agents(tmp_path, etcd.endpoint, run_id="integration") as agents:
        yield agents


@pytest.mark.parametrize("script", ["lightning_ddp.py", "accelerate_ddp.py"])
def test_the_other_node_goes_on_from_the_newest_checkpoint(agents: Agents, script: str, tmp_path: Path) -> None:
    """Of two nodes the one with rank 0, which writes, is killed; the steps since the last commit are made again.

    What is committed is whole, and the end is a checkpoint of the last step.
    """
    store = str(tmp_path / "store")
    given = (str(SCRIPTS / script), store, str(STEPS), "0.15")
    both = [agents.start(name, *given, nodes="1:2", conf="last_call=20") for name in ("a", "b")]
    agents.wait_for("two train", lambda: all(agent.begun() for agent in both), 240)
    assert {agent.begun()[-1]["world"] for agent in both} == {2}
    agents.wait_for("checkpoints", lambda: (newest_step(store) or 0) >= 6)
    victim = next(agent for agent in both if agent.begun()[-1]["rank"] == 0)
    (left,) = (agent for agent in both if agent is not victim)
    victim.kill()
    at_least = newest_step(store)
    assert at_least is not None
    assert left.wait(240) == 0
    begun = left.begun()
    assert [(one["rank"], one["world"]) for one in begun[-1:]] == [(0, 1)]
    assert at_least <= begun[-1]["step"] < STEPS
    ends = re.findall(r"worker: end step=(\d+)", left.text)
    assert ends == [str(STEPS)]
    opened = open_store(store)
    latest = read_latest(opened)
    assert latest is not None
    assert newest_step(store) == STEPS
    assert [finding for finding in verify(opened) if finding.checkpoints] == []

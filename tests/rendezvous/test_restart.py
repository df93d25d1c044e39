"""mode=restart with real torchrun agents, a real etcd and a script that does not know elastic3d."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from chaos.servers.etcd import EtcdServer
from tests.rendezvous.agents import Agent, Agents

pytestmark = [pytest.mark.etcd, pytest.mark.gloo, pytest.mark.timeout(600)]

FOREIGN = str(Path(__file__).with_name("foreign_ddp.py"))


@pytest.fixture(scope="module")
def etcd() -> Iterator[EtcdServer]:
    """One server for all."""
    with EtcdServer() as server:
        yield server


@pytest.fixture
def agents(etcd: EtcdServer, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Agents]:
    """Agents under a run id of the test's own."""
    with Agents(tmp_path, etcd.endpoint, run_id=request.node.name) as agents:
        yield agents


def world(agents: list[Agent]) -> list[tuple[int, int]]:
    """Return (rank, world) of the newest worker of each agent, in rank order."""
    return sorted((newest["rank"], newest["world"]) for agent in agents for newest in agent.begun()[-1:])


def test_a_foreign_script_survives_deaths_and_joins(agents: Agents, tmp_path: Path) -> None:
    """A plain DDP script goes on after the first agent is killed and after two join, one of them as a spare.

    Agents may ask for either backend name. No worker of the killed agent survives it, steps never fall back behind the
    checkpoint, ranks may end seconds apart, and every agent, the spare too, ends with 0.
    """
    script = (FOREIGN, str(tmp_path), "0.1")
    first = [
        agents.start(name, *script, nodes="2:3", backend=backend, conf="last_call=20")
        for name, backend in (("a", "etcd"), ("b", "etcd-v3"), ("c", "etcd"))
    ]
    agents.wait_for("three train", lambda: world(first) == [(0, 3), (1, 3), (2, 3)], 90)
    agents.wait_for("steps", lambda: any("step 5 world=3" in agent.text for agent in first))
    victim = next(agent for agent in first if agent.begun()[-1]["rank"] == 0)
    left = [agent for agent in first if agent is not victim]
    order = sorted(left, key=lambda agent: agent.begun()[-1]["rank"])
    orphan = victim.begun()[-1]["pid"]
    victim.kill()
    agents.wait_for("its worker dies", lambda: orphan not in agents.processes(), 3)

    agents.wait_for("two go on", lambda: world(left) == [(0, 2), (1, 2)])
    assert [agent.begun()[-1]["rank"] for agent in order] == [0, 1], "survivors keep their relative order"
    assert all(agent.begun()[-1]["step"] >= 5 for agent in left)
    agents.wait_for("steps", lambda: any(" world=2" in agent.text for agent in left))

    late = [agents.start(name, *script, nodes="2:3") for name in ("d", "e")]
    agents.wait_for("three again", lambda: world([*left, *late]) == [(0, 3), (1, 3), (2, 3)])
    agents.wait_for("steps", lambda: "world=3" in order[0].text.rpartition("worker: step")[2])
    agents.wait_for("the spare waits", lambda: sum(not agent.begun() for agent in late) == 1)

    (tmp_path / "stop").touch()
    assert {agent.name: agent.wait(60) for agent in (*left, *late)} == {"b": 0, "c": 0, "d": 0, "e": 0} or (
        victim.name != "a"
    )
    assert sum("worker: end" in agent.text for agent in (*left, *late)) == 3
    agents.wait_for("nothing is left", lambda: not agents.processes(), 5)


PLAIN = """\
import os, sys, time
from pathlib import Path
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
os.write(1, f"worker: begin rank={rank} world={world} step=0 pid={os.getpid()}\\n".encode())
while not Path(sys.argv[1], f"stop-{rank}-{world}").exists(): time.sleep(0.05)
"""
"""A worker without torch: ends cleanly once the file for its rank and world exists."""


@pytest.fixture
def plain(tmp_path: Path) -> tuple[str, str]:
    """The script and its argument."""
    (tmp_path / "plain.py").write_text(PLAIN)
    return str(tmp_path / "plain.py"), str(tmp_path)


@pytest.mark.long
def test_an_agent_that_hangs_does_not_hold_up_the_others(
    agents: Agents, plain: tuple[str, str], tmp_path: Path
) -> None:
    """One agent stops, another is killed: the third waits for the stopped one only until its lease ends.

    Once it resumes, the stopped one takes part again.
    """
    three = [agents.start(name, *plain, nodes="1:3", conf="lease=2,grace=1") for name in "abc"]
    agents.wait_for("three run", lambda: world(three) == [(0, 3), (1, 3), (2, 3)], 90)
    # The stopped one would be first in the next generation: the others would meet in its store.
    b, c, a = sorted(three, key=lambda agent: agent.begun()[-1]["rank"])
    os.kill(c.process.pid, signal.SIGSTOP)
    try:
        b.kill()
        agents.wait_for("one goes on", lambda: world([a]) == [(0, 1)], 15)
    finally:
        os.kill(c.process.pid, signal.SIGCONT)
    agents.wait_for("two run", lambda: world([a, c]) == [(0, 2), (1, 2)], 15)
    for rank in range(2):
        (tmp_path / f"stop-{rank}-2").touch()
    assert [agent.wait(20) for agent in (a, c)] == [0, 0]


@pytest.mark.long
def test_an_agent_may_die_after_another_has_finished(agents: Agents, plain: tuple[str, str], tmp_path: Path) -> None:
    """torchrun's exit barrier does not hold the finished one, and the one still at work starts again without it.

    An agent that gets SIGTERM leaves at once, and the job goes on.
    """
    four = [agents.start(name, *plain, nodes="1:4") for name in "abcd"]
    agents.wait_for("four run", lambda: world(four) == [(0, 4), (1, 4), (2, 4), (3, 4)], 90)
    by_rank = {agent.begun()[-1]["rank"]: agent for agent in four}
    (tmp_path / "stop-0-4").touch()
    agents.wait_for("the first finished", lambda: "worker group successfully finished" in by_rank[0].text, 5)
    by_rank[1].kill()
    assert by_rank[0].wait(10) == 0
    left = [by_rank[2], by_rank[3]]
    agents.wait_for("two go on", lambda: world(left) == [(0, 2), (1, 2)], 15)
    left[0].process.terminate()
    assert left[0].wait(40) != 0
    agents.wait_for("one goes on", lambda: world(left[1:]) == [(0, 1)], 15)
    (tmp_path / "stop-0-1").touch()
    assert left[1].wait(20) == 0


def test_a_script_that_always_raises_ends_the_job_everywhere(agents: Agents, tmp_path: Path) -> None:
    """torchrun counts the tries; when one agent gives up, all end with torchrun's exit code 1."""
    script = tmp_path / "raises.py"
    # None raises before both can: the first would have the other's worker ended, which then might have said nothing.
    script.write_text(
        "import os, pathlib, signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "here = pathlib.Path(__file__).with_name('here-' + os.environ['RANK'])\n"
        "here.touch()\n"
        "while len([*here.parent.glob('here-*')]) < 2: time.sleep(0.01)\n"
        "raise ValueError('this script is wrong')\n"
    )
    both = [agents.start(name, str(script), nodes="2", restarts=1) for name in ("a", "b")]
    assert [agent.wait(90) for agent in both] == [1, 1]
    assert all("this script is wrong" in agent.text for agent in both)


@pytest.mark.long
def test_one_worker_that_raises_ends_the_other_agent_too(agents: Agents, tmp_path: Path) -> None:
    """An agent whose own worker is fine ends with the reason when another agent has given up."""
    script = tmp_path / "raises.py"
    script.write_text(
        "import os, time\nif os.environ['RANK'] == '1': raise ValueError('only here')\nwhile True: time.sleep(1)\n"
    )
    both = [agents.start(name, str(script), nodes="2", restarts=0) for name in ("a", "b")]
    assert [agent.wait(90) for agent in both] == [1, 1]
    assert any("torchrun gave up" in agent.text for agent in both)


@pytest.mark.long
def test_startup_failures_end_with_an_error(agents: Agents, tmp_path: Path) -> None:
    """Too few nodes for longer than timeout=, a missing etcd, and a wrong setting."""
    script = tmp_path / "fine.py"
    script.write_text("raise SystemExit('must not run')\n")
    alone = agents.start("alone", str(script), nodes="2", conf="timeout=2")
    agents.endpoint = "127.0.0.1:1"
    lost = agents.start("lost", str(script), conf="timeout=2")
    wrong = agents.start("wrong", str(script), conf="speed=9")
    assert [agent.wait(90) for agent in (alone, lost, wrong)] == [1, 1, 1]
    assert "the minimum is 2: start more nodes" in alone.text
    assert "127.0.0.1:1" in lost.text
    assert "EtcdUnavailable" in lost.text
    assert "unknown key(s) speed" in wrong.text
    assert all("must not run" not in agent.text for agent in agents.all)


@pytest.mark.long
def test_an_etcd_that_comes_back_empty_gets_the_secret_again(tmp_path: Path, plain: tuple[str, str]) -> None:
    """Fully encrypted: etcd is back on the same port without data, nobody restarts, and a newcomer can join."""
    with EtcdServer(tls=True, client_certificates=True) as etcd, Agents(tmp_path, etcd.endpoint, "wiped") as agents:
        files = etcd.certificates
        assert files is not None
        conf = f"ca={files.ca},lease=2,grace=1"
        ours = f"{conf},cert={files.client},key={files.client_key}"
        both = [agents.start(name, *plain, nodes="2:3", conf=ours) for name in "ab"]
        agents.wait_for("two run", lambda: world(both) == [(0, 2), (1, 2)], 120)
        begun = [len(agent.begun()) for agent in both]
        with etcd.client() as client:
            key = "/elastic3d/wiped/board/secret"
            before = client.get(key)
            assert before is not None
            etcd.restore(None)

            def again() -> bool:
                item = client.get(key, budget=20.0)
                return item is not None and item.value == before.value

            agents.wait_for("the secret stands again", again, 30)
        assert sum("secret.restored was=missing" in agent.text for agent in both) == 1
        assert [len(agent.begun()) for agent in both] == begun
        third = agents.start("c", *plain, nodes="2:3", conf=ours)
        agents.wait_for("three run", lambda: world([*both, third]) == [(0, 3), (1, 3), (2, 3)], 120)
        for rank in range(3):
            (tmp_path / f"stop-{rank}-3").touch()
        assert [agent.wait(60) for agent in (*both, third)] == [0, 0, 0]
        assert not any("peer.refused" in agent.text for agent in agents.all)

"""Agents forked from a process that has torch imported behave like any others and look like them."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from chaos.machine.cluster import Cluster, Launch, started_by
from chaos.machine.network import Network
from chaos.machine.preloaded import PreloadedServer
from chaos.machine.processes import marked, wait_until

WORKER = """
import json, os, pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
told = {
    "name": __name__, "argv": sys.argv, "path": sys.path[0], "session": os.getsid(0), "pid": os.getpid(),
    "parent": os.getppid(), "variable": os.environ["OF_THIS_JOB"], "directory": os.getcwd(),
    "threads": len(os.listdir("/proc/self/task")),
}
rank = os.environ["RANK"]
(folder / f"part-{rank}").write_text(json.dumps(told))
(folder / f"part-{rank}").rename(folder / f"told-{rank}")
while not (folder / "end").exists():
    time.sleep(0.02)
print("the worker ends")
sys.exit(int((folder / "end").read_text()))
"""


def launch(folder: Path) -> Launch:
    script = folder / "worker.py"
    script.write_text(WORKER)
    return Launch(
        run_id="preloaded",
        endpoint="127.0.0.1:0",
        backend="c10d",
        conf={"is_host": "true"},
        slots=2,
        script=script,
        script_args=(str(folder),),
        environment={"OF_THIS_JOB": "its own"},
    )


@pytest.mark.gloo
@pytest.mark.parametrize("code", [0, 3])
def test_a_forked_agent_behaves_like_a_started_one(code: int, preloaded: PreloadedServer, tmp_path: Path) -> None:
    """Its workers run the script as `__main__` in sessions of their own, with its mark; its exit code is returned."""
    with started_by(preloaded), Cluster(launch(tmp_path), tmp_path / "nodes") as cluster:
        node = cluster.start_node("node0")
        assert wait_until(lambda: len(list(tmp_path.glob("told-*"))) == 2, 180), cluster.tail("node0")
        workers = [json.loads(path.read_text()) for path in tmp_path.glob("told-*")]
        assert {worker["pid"] for worker in workers} == set(node.keepers())
        assert {process.pid for process in marked(cluster.mark)} >= {node.pid, *node.keepers()}
        assert all(worker["session"] == worker["pid"] and worker["parent"] == node.pid for worker in workers)
        assert {(worker["name"], worker["variable"], worker["directory"]) for worker in workers} == {
            ("__main__", "its own", os.getcwd())
        }
        assert {(worker["path"], *worker["argv"]) for worker in workers} == {
            (str(tmp_path), str(tmp_path / "worker.py"), str(tmp_path))
        }
        assert {worker["threads"] for worker in workers} == {1}
        (tmp_path / "end").write_text(str(code))
        assert cluster.wait(60) == {"node0": 1 if code else 0}, cluster.tail("node0")
        assert "the worker ends" in cluster.tail("node0")
        assert cluster.leftovers() == []


@pytest.mark.gloo
def test_a_killed_agent_is_reported_as_killed(preloaded: PreloadedServer, tmp_path: Path) -> None:
    """Its workers die with it, whether or not anybody waits for it."""
    with started_by(preloaded), Cluster(launch(tmp_path), tmp_path / "nodes") as cluster:
        cluster.start_node("node0")
        assert wait_until(lambda: len(list(tmp_path.glob("told-*"))) == 2, 180), cluster.tail("node0")
        cluster.kill_node("node0")
        assert cluster.wait(10) == {"node0": -signal.SIGKILL}
    assert marked(cluster.mark) == []


@pytest.mark.gloo
@pytest.mark.netns
def test_a_forked_agent_and_its_workers_are_on_the_host_that_is_theirs(
    preloaded: PreloadedServer, tmp_path: Path
) -> None:
    """Those in reserve too, which were forked before they knew what for."""
    with (
        Network() as network,
        started_by(preloaded),
        Cluster(launch(tmp_path), tmp_path / "nodes", network) as cluster,
    ):
        node = cluster.start_node("node0")
        assert wait_until(lambda: len(list(tmp_path.glob("told-*"))) == 2, 180), cluster.tail("node0")
        (host,) = (Path("/run/netns") / network.space(name) for name in network.hosts)
        spaces = {os.stat(f"/proc/{pid}/ns/net").st_ino for pid in (node.pid, *node.keepers())}
        assert spaces == {host.stat().st_ino}
        assert spaces != {os.stat("/proc/self/ns/net").st_ino}
        (tmp_path / "end").write_text("0")
        assert cluster.wait(60) == {"node0": 0}, cluster.tail("node0")

"""Agents forked from a process that has torch imported behave like any others and look like them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import NoReturn

import pytest

from chaos.commands.storm import agents
from chaos.faults.catalogue import lacking
from chaos.faults.fault import Need
from chaos.machine.clocks import Clocks
from chaos.machine.cluster import Cluster, Launch, started_by
from chaos.machine.network import Network
from chaos.machine.preloaded import PreloadedAgent, PreloadedServer, same_libraries
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


def test_libraries_are_the_same_wherever_they_were_read_from(tmp_path: Path) -> None:
    """By what is in them; one that the loader looks for by its name has no file to be read."""
    for folder, text in (("a", "clock"), ("b", "clock"), ("c", "other")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "one.so").write_text(text)
    one, same, other = (f"{tmp_path / folder / 'one.so'} libnamed.so.2" for folder in "abc")
    assert same_libraries(one) == same_libraries(same) == same_libraries(one.replace(" ", ":"))
    assert len({same_libraries(one), same_libraries(other), same_libraries("libnamed.so.2"), same_libraries("")}) == 4


LOOKS_AT_THE_CLOCK = """
import os, pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
child = os.fork()
who = "child" if child == 0 else "worker"
for number in range(3):
    while not (folder / f"look{number}").exists():
        time.sleep(0.01)
    (folder / f"part-{who}").write_text(f"{time.time()} {pathlib.Path('/proc/self/cmdline').read_text()}")
    (folder / f"part-{who}").rename(folder / f"told-{os.environ['NODE']}-{who}{number}")
if child == 0:
    os._exit(0)
os.waitpid(child, 0)
"""


@pytest.mark.gloo
def test_a_forked_agent_has_the_clock_of_its_node(preloaded: PreloadedServer, tmp_path: Path) -> None:
    """It jumps for what the agent starts, and for what that forks; the agents of other nodes have theirs."""
    if why := lacking(Need.COMPILER):
        pytest.skip(why)
    folders = [tmp_path / "node0", tmp_path / "node1"]
    with started_by(preloaded), Clocks() as clocks, ExitStack() as stack:
        clusters = []
        for folder in folders:
            folder.mkdir()
            made = replace(launch(folder), slots=1, environment={"NODE": folder.name})
            made.script.write_text(LOOKS_AT_THE_CLOCK)
            clusters.append(stack.enter_context(Cluster(made, folder / "nodes", clocks=clocks)))
            clusters[-1].start_node(folder.name)
        for number, jump in enumerate((0.0, 3600.0, -7200.0)):
            clocks.shift("node0", jump)
            for folder, off in zip(folders, (sum((0.0, 3600.0, -7200.0)[: number + 1]), 0.0), strict=True):
                (folder / f"look{number}").touch()
                told = [folder / f"told-{folder.name}-{who}{number}" for who in ("worker", "child")]
                assert wait_until(lambda told=told: all(one.exists() for one in told), 180)
                for at, _, command in (one.read_text().partition(" ") for one in told):
                    assert abs(time.time() + off - float(at)) < 60
                    assert "chaos.machine.preloaded" in command
        for cluster, folder in zip(clusters, folders, strict=True):
            assert cluster.wait(60) == {folder.name: 0}
            assert cluster.leftovers() == []


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


HOLDER = """
import sys, time
from pathlib import Path
from chaos.machine.cluster import Cluster, started_by
from chaos.machine.preloaded import PreloadedServer
from chaos.report.watching import clean_end
from tests.chaos.machine.test_preloaded import launch
folder = Path(sys.argv[1])
with clean_end(), PreloadedServer() as server:
    with started_by(server), Cluster(launch(folder), folder / "nodes") as cluster:
        try:
            for name in sys.argv[2:]:
                cluster.start_node(name)
            print("started", flush=True)
            time.sleep(600)
        finally:
            print(cluster.exit_codes(), flush=True)
"""


@pytest.fixture
def heard() -> Iterator[None]:
    """Have SIGHUP end a process, also where the tests themselves run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.gloo
@pytest.mark.usefixtures("heard")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_ctrl_c_and_a_closed_terminal_leave_the_server_to_its_owner(number: signal.Signals, tmp_path: Path) -> None:
    """They reach all processes of the terminal's foreground group: the owner can still ask how its agents ended."""
    temp = tmp_path / "temp"
    temp.mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path), "node0", "node1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(temp)},
        start_new_session=True,
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "started\n"
        os.killpg(holder.pid, number)
        printed, said = holder.communicate(timeout=60)
    assert (holder.returncode, said) == (128 + number, "")
    assert printed == "{'node0': None, 'node1': None}\n"
    assert list(temp.glob("elastic3d-*")) == []


@pytest.mark.gloo
@pytest.mark.parametrize("preloaded", [True, False])
def test_commands_fork_agents_where_they_are_asked_to(preloaded: bool, tmp_path: Path) -> None:
    """`--preloaded` has every agent of the block forked; otherwise each is a fresh interpreter."""
    with agents(preloaded), Cluster(launch(tmp_path), tmp_path / "nodes") as cluster:
        node = cluster.start_node("node0")
        assert isinstance(node.process, PreloadedAgent) is preloaded
        node.process.kill()


@pytest.mark.gloo
@pytest.mark.parametrize("asked", [True, False])
def test_agents_whose_server_is_gone_died_with_it(asked: bool, tmp_path: Path) -> None:
    """Whoever asks for them first is told so; the cluster ends in order in any case, and leaves nothing behind."""
    with PreloadedServer() as server:
        with started_by(server), Cluster(launch(tmp_path), tmp_path / "nodes") as cluster:
            for name in ("node0", "node1"):
                cluster.start_node(name)
            assert server._process is not None
            server._process.kill()
            if asked:
                with pytest.raises(ChildProcessError, match="that forks agents ended"):
                    cluster.wait(10)
                assert cluster.wait(10) == {"node0": -signal.SIGKILL, "node1": -signal.SIGKILL}
    assert marked(cluster.mark) == []


class Interrupted(Exception):
    """A signal came."""


@pytest.fixture
def interrupted() -> Iterator[None]:
    """Have SIGALRM interrupt what goes on, as SIGINT does under `clean_end`."""

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        raise Interrupted

    before = signal.signal(signal.SIGALRM, interrupt)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.gloo
@pytest.mark.usefixtures("interrupted")
def test_an_answer_that_nobody_waits_for_any_more_is_not_taken_for_another_one(
    preloaded: PreloadedServer, tmp_path: Path
) -> None:
    """A signal ends the wait for it: an agent that was started so is ended, and an exit code can be asked for again."""
    assert preloaded._process is not None
    server = preloaded._process.pid
    with started_by(preloaded), Cluster(launch(tmp_path), tmp_path / "nodes") as cluster:
        node = cluster.start_node("node0")
        os.kill(server, signal.SIGSTOP)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            with pytest.raises(Interrupted):
                cluster.start_node("node1")
            node.process.kill()
            signal.setitimer(signal.ITIMER_REAL, 0.5)
            with pytest.raises(Interrupted):
                node.process.wait()
        finally:
            os.kill(server, signal.SIGCONT)
        assert node.process.wait(30) == -signal.SIGKILL
        assert wait_until(lambda: not marked(cluster.mark), 5)


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

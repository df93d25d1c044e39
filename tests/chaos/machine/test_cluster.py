"""A local cluster of torchrun agents, with torch's own rendezvous and a script that does nothing."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import NoReturn

import pytest

from chaos.machine.cluster import Cluster, Launch, left_in, started_by
from chaos.machine.processes import MARK, all_pids, end_all, leashed, marked, wait_until

WAITS = """
import os, pathlib, subprocess, sys, time
folder = pathlib.Path(sys.argv[1])
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
(folder / f"started-{os.environ['RANK']}").write_text(str(child.pid))
while not (folder / "end").exists():
    time.sleep(0.05)
child.kill()
child.wait()
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "waits.py"
    path.write_text(textwrap.dedent(WAITS))
    return path


def launch(script: Path, folder: Path) -> Launch:
    return Launch(
        run_id="cluster-test",
        endpoint="127.0.0.1:0",
        backend="c10d",
        conf={"is_host": "true"},
        slots=2,
        script=script,
        script_args=(str(folder),),
    )


def test_the_command_line_is_that_of_torchrun(tmp_path: Path) -> None:
    """A person could type it: every option is torchrun's own."""
    command = Launch(
        run_id="gpt",
        endpoint="127.0.0.1:2379",
        script=Path("train.py"),
        script_args=("--steps=3",),
        min_nodes=2,
        max_nodes=4,
        conf={"mode": "resident"},
    ).command({"node": "node1"}, tmp_path)
    assert command == [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes=2:4", "--nproc-per-node=1", "--rdzv-backend=etcd"),
        *("--rdzv-endpoint=127.0.0.1:2379", "--rdzv-id=gpt", "--rdzv-conf=mode=resident,node=node1"),
        *("--local-addr=127.0.0.1", "--max-restarts=0", f"--log-dir={tmp_path}", "train.py", "--steps=3"),
    ]


@pytest.mark.gloo
def test_a_node_with_an_environment_of_its_own_is_started_fresh(script: Path, tmp_path: Path) -> None:
    """What is there already has read its settings, such as which instructions torch computes with."""

    def not_by_this(*_: object) -> NoReturn:
        raise AssertionError("the node was forked")

    with started_by(not_by_this), Cluster(launch(script, tmp_path), tmp_path / "nodes") as cluster:
        cluster.start_node("node0", environment={"ATEN_CPU_CAPABILITY": "default"})
        with pytest.raises(AssertionError, match="the node was forked"):
            cluster.start_node("node1")


@pytest.mark.gloo
def test_a_cluster_starts_waits_and_returns_the_exit_codes(script: Path, tmp_path: Path) -> None:
    """Agents end by themselves, and leave nothing behind."""
    with Cluster(launch(script, tmp_path), tmp_path / "nodes") as cluster:
        node = cluster.start_node("node0")
        assert wait_until((tmp_path / "started-1").exists, 60), cluster.tail("node0")
        assert len(node.keepers()) == 2
        everybody = {process.pid for process in marked(cluster.mark)}
        assert everybody > set(node.keepers())
        assert not node.group.folders or {*node.group.pids()} >= everybody
        (tmp_path / "end").touch()
        assert cluster.wait(60) == {"node0": 0}, cluster.tail("node0")
        assert cluster.leftovers() == []
        assert cluster.groups_left() == []
        assert not [folder for folder in node.group.folders if folder.exists()]


def test_files_that_count_as_left_are_not_torchs_own(tmp_path: Path) -> None:
    """Those of its launcher, and an empty file of its loader, of which Python may lose track when a process dies."""
    for name in ("torchelastic_1", "tmpo557wl3z", "pymp-o557wl3z", "tmpo557wl3"):
        (tmp_path / name).touch()
    (tmp_path / "tmp0123abcd").write_text("something")
    assert [path.name for path in left_in(tmp_path)] == ["pymp-o557wl3z", "tmp0123abcd", "tmpo557wl3"]


@pytest.mark.gloo
def test_leaving_the_block_ends_the_orphans_of_a_killed_agent(script: Path, tmp_path: Path) -> None:
    """They are found by their mark, even in a session of their own, and ended by pid."""
    with Cluster(launch(script, tmp_path), tmp_path / "nodes") as cluster:
        cluster.start_node("node0")
        assert wait_until((tmp_path / "started-1").exists, 60), cluster.tail("node0")
        cluster.kill_node("node0")
        assert cluster.wait(10) == {"node0": -9}
        assert len(cluster.leftovers(grace=0.2)) >= 2
        group = cluster.node("node0").group
        assert cluster.groups_left(grace=0.2) == [f"control group {folder}" for folder in sorted(group.folders)]
    assert marked(cluster.mark) == []
    assert not [folder for folder in group.folders if folder.exists()]


def test_a_leashed_process_dies_with_its_starter() -> None:
    """SIGKILL to the owner of a cluster kills its agents too."""
    code = (
        "import subprocess, sys, time; from chaos.machine.processes import leashed\n"
        "child = subprocess.Popen(leashed([sys.executable, '-c', 'import time; time.sleep(600)']))\n"
        "print(child.pid, flush=True); time.sleep(600)"
    )
    holder = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    with holder:
        assert holder.stdout is not None
        pid = int(holder.stdout.readline())
        os.kill(pid, 0)
        holder.kill()
    assert wait_until(lambda: not _lives(pid), 5)


def test_marked_processes_are_found_and_ended() -> None:
    """The mark is inherited; processes are ended by pid, never by name."""
    environment = {**os.environ, MARK: "found-and-ended"}
    command = leashed([sys.executable, "-c", "import time; time.sleep(600)"])
    with subprocess.Popen(command, env=environment) as process:
        assert wait_until(lambda: [one.pid for one in marked("found-and-ended")] == [process.pid], 5)
        assert end_all("found-and-ended") == []
        assert process.wait(5) == -9


def test_a_process_that_becomes_another_program_is_found_all_the_while(tmp_path: Path) -> None:
    """Within exec it has no environment for a moment; read then, it would be left behind."""
    script = tmp_path / "again.sh"
    script.write_text('exec /bin/sh "$0"\n')
    command = leashed(["/bin/sh", str(script)])
    with subprocess.Popen(command, env={**os.environ, MARK: "becomes"}) as process:
        try:
            assert wait_until(lambda: script.name in str(marked("becomes")), 20)
            looks = [[one.pid for one in marked("becomes", besides=all_pids() - {process.pid})] for _ in range(1000)]
        finally:
            process.kill()
    assert looks == [[process.pid]] * 1000


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False

"""The scripts in deploy/slurm, on a real Slurm: whatever happens to their nodes, the job ends with the same bits.

Slow, all of them: they need Slurm, which only some machines have, and Slurm takes its time over a dead node.
"""

from __future__ import annotations

import contextlib
import json
import re
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from chaos.history.follow import Follower, Picture, picture
from chaos.machine.cluster import Cluster, Launch
from chaos.machine.processes import send, wait_until
from chaos.servers.etcd import EtcdServer
from elastic3d.etcd_server.binary import find_etcd
from tests.deploy.slurm_cluster import SlurmCluster, missing
from tests.paths import ROOT

SCRIPTS = ROOT / "deploy" / "slurm"
TRAINING = ROOT / "chaos" / "scripts" / "train_gpt.py"
SIZES = ("--width=16", "--blocks=3", "--context=16", "--global-batch=8", "--micro-batch=2")
STEPS = 150
OVER = {"COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL", "TIMEOUT"}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(280),
    pytest.mark.skipif(bool(missing()), reason=f"needs Slurm; not here: {', '.join(missing())}"),
]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of the same training on one node without a Slurm, to which nothing happens."""
    out = tmp_path_factory.mktemp("undisturbed")
    with EtcdServer() as etcd:
        launch = Launch(
            run_id="undisturbed",
            endpoint=etcd.endpoint,
            script=TRAINING,
            script_args=(*SIZES, f"--steps={STEPS}", f"--out={out}"),
            conf={"mode": "resident"},
        )
        with Cluster(launch, out / "nodes") as cluster:
            cluster.start_node("node0")
            assert cluster.wait(120) == {"node0": 0}, cluster.tail("node0")
    return digest(out)


def digest(out: Path) -> str:
    """Return the digest that a training wrote."""
    return str(json.loads((out / "result.json").read_text())["digest"])


@dataclass(slots=True)
class Job:
    """One training, whose scripts are edited as a person would."""

    slurm: SlurmCluster
    folder: Path
    endpoint: str = ""
    nodes: str = "1:3"
    pause: float = 0.1

    @property
    def address(self) -> Path:
        """The file by which jobs find the etcd that one of them has started."""
        return self.folder / "etcd"

    def submit(self, name: str, *options: str, nodes: int = 1) -> str:
        """Submit a script, for so many nodes that train; return the job's number."""
        training = [
            *(str(TRAINING), *SIZES, f"--steps={STEPS}", f"--pause={self.pause}"),
            *(f"--out={self.folder}", f"--events={self.folder / 'events'}", f"--store={(self.folder / 's').as_uri()}"),
        ]
        values = {
            "RUN_ID": "gpt-1b",
            "NODES": self.nodes,
            "ENDPOINT": self.endpoint,
            "ADDRESS": str(self.address),
            "SLOTS": "1",
            "TRAIN": f"({' '.join(training)})",
            "PATH": f"{Path(sys.executable).parent}:{find_etcd().parent}:$PATH",
            "WATCH": "1",
        }
        text = (SCRIPTS / f"{name}.sbatch").read_text()
        head, edit, rest = text.partition("# Edit from here ...\n")
        top, _, _ = rest.partition("# ... to here.\n")
        for key in re.findall(r"^([A-Z_]+)=", top, re.MULTILINE):
            rest = re.sub(rf"^{key}=.*$", f"{key}={values[key]}", rest, count=1, flags=re.MULTILINE)
        script = self.folder / f"{name}.sbatch"
        script.write_text(head.replace("--nodes=8", f"--nodes={nodes}") + edit + rest)
        return self.slurm.submit(script, f"--output={self.folder / name}-%j.out", *options)

    def picture(self) -> Picture:
        """Return what has happened so far."""
        folder = self.folder / "events"
        return picture(Follower(folder).poll() if folder.exists() else [])

    def wait_for_step(self, step: int, seconds: float = 90) -> None:
        """Return when the job has made a step; fail if it ends before that, or takes too long."""
        assert wait_until(lambda: self.picture().step >= step, seconds, interval=0.2), self.report()

    def wait_for_nodes(self, count: int, seconds: float = 60) -> None:
        """Return when as many nodes train."""

        def there() -> bool:
            newest = self.picture().generation
            return newest is not None and len(newest.nodes) == count and newest.first_step is not None

        assert wait_until(there, seconds, interval=0.2), self.report()

    def wait(self, number: str, seconds: float = 120) -> str:
        """Return the state in which a job ended."""
        assert wait_until(lambda: self.slurm.state(number) in OVER, seconds, interval=0.2), self.report()
        return self.slurm.state(number)

    def begin_again(self, number: str, seconds: float = 60) -> None:
        """Wait until Slurm has queued a job again, and have it start at once instead of in two minutes."""

        def queued() -> bool:
            shown = self.slurm.show(number)
            return shown["JobState"] == "PENDING" and shown["Restarts"] == "1"

        assert wait_until(queued, seconds, interval=0.2), self.report()
        # Its nodes may still be busy with ending it.
        assert wait_until(lambda: "COMPLETING" not in self.slurm.run("squeue", "--noheader", "--format=%T"), 30)
        self.slurm.run("scontrol", "update", f"JobId={number}", "StartTime=now")

    def report(self) -> str:
        """Return what the jobs have printed, for messages about what went wrong."""
        outputs = "\n".join(f"--- {path.name}\n{path.read_text()[-4000:]}" for path in self.folder.glob("*.out"))
        queue = self.slurm.run("squeue", "--states=all", "--format=%i %T %r %N %B")
        return f"{queue}\n{self.slurm.run('sinfo', '--Node')}\n{outputs}"


@pytest.fixture
def slurm() -> Iterator[SlurmCluster]:
    with SlurmCluster(3, timeout=5) as cluster:
        yield cluster


@pytest.fixture
def job(slurm: SlurmCluster, tmp_path: Path) -> Job:
    """A job whose etcd is its own."""
    return Job(slurm, tmp_path)


@pytest.fixture
def served(slurm: SlurmCluster, tmp_path: Path) -> Iterator[Job]:
    """A job whose etcd is the site's."""
    with EtcdServer() as etcd:
        yield Job(slurm, tmp_path, etcd.endpoint)


def declare_down(slurm: SlurmCluster, name: str) -> None:
    """Have Slurm know at once that a node is dead, as after `SlurmdTimeout`."""
    slurm.run("scontrol", "update", f"NodeName={name}", "State=DOWN", "Reason=killed")


def return_to_service(slurm: SlurmCluster, name: str) -> None:
    """Start a dead node anew."""
    slurm.start_node(name)
    slurm.run("scontrol", "update", f"NodeName={name}", "State=RESUME")


def test_a_dead_node_ends_neither_the_allocation_nor_the_step(job: Job, undisturbed: str) -> None:
    """The others go on at once, and still do when Slurm finds out, many seconds later; etcd is the job's own."""
    job.pause = 0.4
    number = job.submit("elastic", nodes=3)
    job.wait_for_nodes(3)
    job.wait_for_step(10)
    job.slurm.kill_node("node2")
    job.wait_for_nodes(2, 20)
    assert job.slurm.show(number)["NodeList"] == "node[0-2]", "Slurm has not noticed yet"
    assert wait_until(lambda: job.slurm.show(number)["NodeList"] == "node[0-1]", 60, interval=0.5), job.report()
    step = job.picture().step
    assert step < STEPS, "training went on beyond that"
    assert job.wait(number) == "COMPLETED", job.report()
    view = job.picture()
    assert [len(generation.nodes) for generation in view.generations] == [3, 2]
    assert not view.conflicts
    assert digest(job.folder) == undisturbed


def test_a_killed_torchrun_does_not_fail_the_job_that_the_others_end(job: Job, undisturbed: str) -> None:
    """As after the kernel's OOM killer: srun reports 137, and elastic3d that the job has ended."""
    number = job.submit("elastic", nodes=2)
    job.wait_for_nodes(2)
    job.wait_for_step(10)
    send(agents(job.slurm, "node1"), signal.SIGKILL)
    assert job.wait(number) == "COMPLETED", job.report()
    assert "Killed" in job.report()
    assert digest(job.folder) == undisturbed


def agents(slurm: SlurmCluster, name: str) -> list[int]:
    """Return the pids of the torchruns of a node."""
    pids = []
    for pid in slurm.processes(name):
        # Those that look after the first node come and go.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            if b"/torchrun\0" in command:
                pids.append(pid)
    return pids


def test_a_dead_first_node_has_the_job_begin_anew_from_the_store(job: Job, undisturbed: str) -> None:
    """It takes the batch script and etcd along; a step on the second node notices."""
    number = job.submit("elastic", nodes=3)
    job.wait_for_nodes(3)
    job.wait_for_step(20)
    job.slurm.kill_node("node0")
    declare_down(job.slurm, "node0")
    return_to_service(job.slurm, "node0")
    job.begin_again(number)
    assert job.wait(number) == "COMPLETED", job.report()
    assert "store" in [generation.restored_from for generation in job.picture().generations]
    assert digest(job.folder) == undisturbed


@pytest.mark.parametrize("script", ["requeue", "elastic"])
def test_before_its_time_is_up_the_job_saves_its_last_step_and_queues_again(
    script: str, served: Job, undisturbed: str
) -> None:
    """It gets the signal that `--signal=B:USR1` asks for, and goes on with the very next step."""
    number = served.submit(script, nodes=2)
    served.wait_for_nodes(2)
    served.wait_for_step(13)
    served.slurm.run("scancel", "--batch", "--signal=USR1", number)
    served.begin_again(number)
    last = served.picture().step
    assert served.wait(number) == "COMPLETED", served.report()
    view = served.picture()
    assert [generation.first_step for generation in view.generations][-1] == last + 1
    assert sum(generation.steps_repeated for generation in view.generations) == 0
    assert digest(served.folder) == undisturbed


def test_a_job_of_fixed_size_begins_anew_when_a_node_dies(served: Job, undisturbed: str) -> None:
    """Slurm ends it whole, and queues it again."""
    number = served.submit("fixed", nodes=2)
    served.wait_for_nodes(2)
    served.wait_for_step(20)
    served.slurm.kill_node("node1")
    declare_down(served.slurm, "node1")
    return_to_service(served.slurm, "node1")
    served.begin_again(number)
    assert served.wait(number) == "COMPLETED", served.report()
    assert digest(served.folder) == undisturbed


@pytest.mark.parametrize(("how", "state"), [("--signal=TERM", "FAILED"), ("--state=RUNNING", "CANCELLED")])
def test_a_second_job_joins_the_first_and_leaves_at_a_step_boundary(
    how: str, state: str, job: Job, undisturbed: str
) -> None:
    """By a signal to its torchrun, or as Slurm ends any job: no step is done twice, and the first job goes on."""
    number = job.submit("elastic", nodes=2)
    job.wait_for_nodes(2)
    joiner = job.submit("array", "--array=0-0")
    job.wait_for_nodes(3)
    job.slurm.run("scancel", how, f"{joiner}_0")
    job.wait_for_nodes(2)
    assert job.wait(number) == "COMPLETED", job.report()
    view = job.picture()
    assert [len(generation.nodes) for generation in view.generations] == [2, 3, 2]
    assert sum(generation.steps_repeated for generation in view.generations) == 0
    assert view.generations[-1].cause == "drain"
    assert job.wait(f"{joiner}_0") == state
    assert digest(job.folder) == undisturbed


def test_an_element_of_an_array_whose_node_dies_is_queued_again_and_joins(job: Job, undisturbed: str) -> None:
    """The others go on meanwhile; etcd is a job of its own."""
    server = job.submit("etcd")
    assert wait_until(job.address.exists, 20), job.report()
    array = job.submit("array", "--array=0-1")
    job.wait_for_nodes(2)
    job.wait_for_step(10)
    victim = job.slurm.show(f"{array}_1")["NodeList"]
    job.slurm.kill_node(victim)
    job.wait_for_nodes(1)
    declare_down(job.slurm, victim)
    return_to_service(job.slurm, victim)
    job.begin_again(f"{array}_1")
    job.wait_for_nodes(2)
    assert [job.wait(f"{array}_{element}") for element in range(2)] == ["COMPLETED"] * 2, job.report()
    job.slurm.run("scancel", server)
    job.wait(server)
    assert not job.address.exists()
    assert digest(job.folder) == undisturbed


def test_a_heterogeneous_job_has_its_etcd_beside_the_nodes_that_train(job: Job, undisturbed: str) -> None:
    """The first component has the script and etcd, the second the trainers."""
    number = job.submit("heterogeneous", nodes=2)
    job.wait_for_nodes(2)
    assert [len(agents(job.slurm, name)) for name in job.slurm.names] == [0, 1, 1]
    assert job.wait(number) == "COMPLETED", job.report()
    assert digest(job.folder) == undisturbed

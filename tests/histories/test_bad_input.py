"""Errors are explained on the command line that caused them; the exit code is not 0, and nothing is left behind."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from chaos.machine.cluster import Cluster, Launch
from chaos.machine.processes import wait_until
from chaos.servers.etcd import EtcdServer
from tests.paths import ROOT

pytestmark = [pytest.mark.etcd, pytest.mark.gloo, pytest.mark.timeout(180)]

SCRIPT = Path(__file__).parent / "scripts" / "bad_input.py"


def launch_of(
    etcd: EtcdServer,
    run_id: str,
    script_args: tuple[str, ...],
    *,
    script: Path = SCRIPT,
    most: int = 1,
    environment: Mapping[str, str] | None = None,
    **conf: str,
) -> Launch:
    """Return the launch of a job that a single node may begin."""
    return Launch(
        run_id=run_id,
        endpoint=etcd.endpoint,
        script=script,
        script_args=script_args,
        min_nodes=1,
        max_nodes=most,
        conf={"mode": "resident", **conf},
        environment=environment or {},
    )


def start(
    workdir: Path, endpoint: str, arguments: Sequence[str], *, nodes: int = 1, minimum: int = 1, **conf: str
) -> tuple[set[int | None], str]:
    """Run the script on `nodes` agents until all have ended; return their exit codes and output."""
    launch = Launch(
        run_id=f"bad-{workdir.name}",
        endpoint=endpoint,
        script=SCRIPT,
        script_args=tuple(arguments),
        min_nodes=minimum,
        max_nodes=max(minimum, nodes),
        conf={"mode": "resident", "last_call": "1", **conf},
    )
    with Cluster(launch, workdir) as cluster:
        for number in range(nodes):
            cluster.start_node(f"node{number}")
        codes = cluster.wait(120)
        assert not cluster.leftovers()
        return set(codes.values()), "\n".join(node.log.read_text() for node in cluster.nodes)


CASES = {
    "blocks": ["no ModuleList", "layers", "blocks"],
    "loop": ["head", "chain"],
    "batch": ["micro_batch", "3", "8"],
    "store": ["/proc/nowhere/store", "cannot be used"],
}


@pytest.mark.long
@pytest.mark.parametrize("kind", CASES)
def test_a_mistake_in_the_script_is_named(kind: str, job_etcd: EtcdServer, tmp_path: Path) -> None:
    """The model, the batches and the store are checked before any world is formed."""
    codes, said = start(tmp_path, job_etcd.endpoint, [kind])
    assert codes == {1}
    for word in CASES[kind][1:]:
        assert word in said


def test_a_missing_etcd_is_reported(tmp_path: Path, refusing_port: Callable[[], int]) -> None:
    """With its endpoint and what to check."""
    endpoint = f"127.0.0.1:{refusing_port()}"
    codes, said = start(tmp_path, endpoint, ["good"])
    assert codes == {1}
    assert endpoint in said


@pytest.mark.long
def test_too_few_nodes_fail_the_job_after_its_timeout(job_etcd: EtcdServer, tmp_path: Path) -> None:
    """That of --rdzv-conf=timeout; the message names the settings."""
    codes, said = start(tmp_path, job_etcd.endpoint, ["good"], minimum=2, timeout="3")
    assert codes == {1}
    assert "1 node(s) for 3 s, the minimum is 2" in said


def test_the_users_own_error_ends_the_job_with_its_traceback(job_etcd: EtcdServer, tmp_path: Path) -> None:
    """Raised on every try: all agents exit with torchrun's own code, and its traceback and rank are shown once."""
    codes, said = start(tmp_path, job_etcd.endpoint, ["raise", "9"], nodes=2, minimum=2)
    assert codes == {1}
    assert "the user's own mistake" in said
    assert "bad_input.py" in said
    assert "rank " in said
    assert said.count('raise KeyError("the user') == 1


@pytest.mark.long
def test_memory_that_runs_out_is_named_with_what_helps(job_etcd: EtcdServer, tmp_path: Path) -> None:
    """As what it is, once a try, with who holds the memory; each of them is a generation with that cause."""
    codes, said = start(tmp_path, job_etcd.endpoint, ["memory", "9"])
    assert codes == {1}
    assert said.count("elastic3d: error: memory.exhausted ") == 3
    assert "What helps: a smaller micro_batch" in said
    assert "the host has " in said
    assert "generation.sealed number=3 cause=out_of_memory" in said


def test_an_error_after_a_step_on_every_try_ends_the_job(job_etcd: EtcdServer, tmp_path: Path) -> None:
    """An evaluation is repeated, not skipped: a job in which it always fails must not end as if all were well."""
    codes, said = start(tmp_path, job_etcd.endpoint, ["evaluate", "9"])
    assert codes == {1}
    assert "the evaluation's own mistake" in said
    assert "elastic3d: error: job.ended kind=error" in said


@pytest.mark.long
def test_a_trainers_log_reaches_torchruns_output_once(job_etcd: EtcdServer, tmp_path: Path) -> None:
    """With its level and its origin."""
    codes, said = start(tmp_path, job_etcd.endpoint, ["log", "2"])
    assert codes == {0}
    lines = [line for line in said.splitlines() if "cache.unfit" in line]
    assert len(lines) == 1
    words = "elastic3d: warning: cache.unfit error=said by a trainer node=node0 slot=0 generation=1 rank=0"
    assert lines[0].endswith(words)
    assert any("elastic3d: info: generation.sealed number=1" in line for line in said.splitlines())


@pytest.mark.long
def test_without_snapshots_a_failed_evaluation_is_repeated(job_etcd: EtcdServer, tmp_path: Path) -> None:
    """The state is a checkpoint from before the evaluation, whether the initial or an older one."""
    launch = launch_of(job_etcd, "flaky", ("flaky", "9"), environment={"TRIED": str(tmp_path)}, last_call="0")
    with Cluster(launch, tmp_path / "cluster") as cluster:
        node = cluster.start_node("node0")
        codes = cluster.wait(150)
        said = node.log.read_text()
    assert codes == {"node0": 0}, said
    assert {f"{step}-0" for step in (4, 8)} <= {file.name for file in tmp_path.iterdir()}
    for step in (4, 8):
        assert f"step {step} is evaluated" in said


@pytest.mark.long
def test_another_job_under_the_same_run_id_is_refused(job_etcd: EtcdServer, tmp_path: Path) -> None:
    """A node whose model or batches differ is told why; the running job continues to its end."""
    launch = launch_of(job_etcd, "shared-id", ("good", "1000000"), most=2, last_call="0")
    stranger = ROOT / "chaos" / "scripts" / "train_gpt.py"
    with Cluster(launch, tmp_path / "a") as first:
        node = first.start_node("node0")
        assert wait_until(lambda: "generation.sealed" in node.log.read_text(), 150)
        arguments = ("--width=16", "--context=16", "--blocks=2")
        other = launch_of(job_etcd, "shared-id", arguments, script=stranger, most=2)
        with Cluster(other, tmp_path / "b") as second:
            second.start_node("node1")
            assert second.wait(150) == {"node1": 1}
            assert "another --rdzv-id" in second.node("node1").log.read_text()
        assert first.running() == ["node0"]


@pytest.mark.long
def test_a_node_whose_data_is_in_another_order_is_refused(job_etcd: EtcdServer, tmp_path: Path) -> None:
    """It is told what to look at, and the running job goes on."""

    def launch(**environment: str) -> Launch:
        return launch_of(job_etcd, "unsorted", ("good", "1000000"), most=2, environment=environment, last_call="0")

    with Cluster(launch(), tmp_path / "a") as first:
        node = first.start_node("node0")
        assert wait_until(lambda: "generation.sealed" in node.log.read_text(), 150)
        with Cluster(launch(LISTED_BACKWARDS="1"), tmp_path / "b") as second:
            second.start_node("node1")
            assert second.wait(150) == {"node1": 1}
            assert "makes other samples of the same numbers" in second.node("node1").log.read_text()
        assert first.running() == ["node0"]


def test_a_newcomer_whose_code_raises_is_evicted(job_etcd: EtcdServer, tmp_path: Path) -> None:
    """A file missing on one node ends that node, at its first try and with the traceback; the job goes on."""

    def launch(**environment: str) -> Launch:
        arguments = ("good", "1000000")
        return launch_of(job_etcd, "lacking", arguments, most=2, environment=environment, last_call="0")

    with Cluster(launch(), tmp_path / "a") as first:
        node = first.start_node("node0")
        assert wait_until(lambda: "generation.sealed" in node.log.read_text(), 150)
        with Cluster(launch(NEEDED_FILE="/nowhere/at/all"), tmp_path / "b") as second:
            second.start_node("node1")
            assert second.wait(150) == {"node1": 1}
            said = second.node("node1").log.read_text()
        assert "Mend what is wrong on that node" in said
        assert said.count('open(os.environ["NEEDED_FILE"])') == 1
        assert wait_until(lambda: "generation.sealed number=3 cause=error" in node.log.read_text(), 150)
        assert first.running() == ["node0"]


@pytest.mark.long
def test_torchruns_log_files_have_the_trainers_output(job_etcd: EtcdServer, tmp_path: Path) -> None:
    """What a forked trainer prints is in the files of --redirects, complete, although it ends by os._exit."""
    launch = Launch(
        run_id="redirected",
        endpoint=job_etcd.endpoint,
        script=SCRIPT,
        script_args=("good",),
        slots=2,
        conf={"mode": "resident", "last_call": "0"},
        options=("--redirects=3",),
    )
    with Cluster(launch, tmp_path) as cluster:
        cluster.start_node("node0")
        assert cluster.wait(120) == {"node0": 0}
        printed = [path.read_text() for path in (tmp_path / "node0" / "torchrun").rglob("stdout.log")]
    assert sorted(line for text in printed for line in text.splitlines()) == [
        "the trainer of rank 0 speaks",
        "the trainer of rank 1 speaks",
    ]

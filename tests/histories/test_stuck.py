"""A rank that holds all others up is named and the job goes on, with the bits of the undisturbed run.

Real torchrun agents; the script fails once in a chosen way. Times are not judged here: `elastic3d chaos score` measures
them.
"""

from __future__ import annotations

import functools
import json
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from chaos.history.follow import Picture
from chaos.machine.hung_files import HungFiles
from chaos.machine.processes import wait_until
from chaos.playing.play import play
from chaos.score.kinds import KINDS
from chaos.score.playing import Unable, play_trial, setting
from chaos.score.results import Result
from chaos.score.series import APART, FIRST, QUIET, Series, play_series, steps_of
from chaos.score.trials import Trial, trials
from chaos.scripts import mark_of
from chaos.servers.etcd import EtcdServer
from elastic3d.health.evidence import FOLDER, VERDICT
from elastic3d.values import Layout
from tests.histories.conftest import Quiet

pytestmark = [pytest.mark.etcd, pytest.mark.gloo, pytest.mark.timeout(420)]

STEPS = 12
PAIR = Layout(pp=1, dp=2)
STUCK = [kind for kind, row in KINDS.items() if not (row.lies or row.lasts or row.late)]


def played(trial: Trial, quiet: Quiet, etcd: EtcdServer, workdir: Path) -> Result:
    """Play a trial; what cannot be tried here is skipped."""
    undisturbed = quiet(setting(None, trial.layout, setting(trial, trial.layout, STEPS).steps))
    try:
        return play_trial(trial, lambda: undisturbed, etcd=etcd, workdir=workdir, steps=STEPS)
    except Unable as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        pytest.param("stop", PAIR, id="stop", marks=pytest.mark.long),
        *(pytest.param(kind, PAIR, id=kind, marks=pytest.mark.slow) for kind in STUCK if kind != "stop"),
        *(pytest.param(kind, Layout(pp=2, dp=2), id=f"{kind} of a pipeline", marks=pytest.mark.slow) for kind in STUCK),
    ],
)
def test_whoever_holds_the_job_up_is_named_and_the_bits_stay(
    kind: str, layout: Layout, job_etcd: EtcdServer, quiet: Quiet, tmp_path: Path
) -> None:
    """One verdict on the right node, evidence on disk, nothing done in a control, and the same digest in the end."""
    trial = Trial(kind=kind, rank=1, step=5, micro_batch=0, layout=layout)
    result = played(trial, quiet, job_etcd, tmp_path)
    assert result.broken == (), "\n".join(result.broken)
    if KINDS[kind].control:
        assert result.first is None, result.said
        return
    assert result.happened
    assert result.classed, result.said
    assert result.named, result.said
    if kind in ("memory", "devicememory"):
        return
    assert len(list((tmp_path / "events" / FOLDER).glob(f"*/{VERDICT}"))) >= 1
    assert list((tmp_path / "events" / FOLDER).glob("*/slot0/record.bin"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in KINDS if KINDS[kind].lies])
def test_whoever_computes_wrongly_is_named_and_the_bits_stay(
    kind: str, job_etcd: EtcdServer, quiet: Quiet, tmp_path: Path
) -> None:
    """In the same step if it is audited, whoever audits and whoever leads; and nobody who is honest."""
    (trial,) = trials([kind], 1, 1, steps=STEPS)
    result = played(trial, quiet, job_etcd, tmp_path)
    assert result.broken == (), "\n".join(result.broken)
    assert result.happened
    assert result.classed, result.said
    assert result.named, result.said


@pytest.mark.long
def test_a_job_meets_faults_one_after_another(job_etcd: EtcdServer, quiet: Quiet, tmp_path: Path) -> None:
    """Both on one rank, each named on its node, and the bits are those of a job that met none."""
    steps = steps_of(2)
    given = [("stop", FIRST), ("skip", FIRST + APART[0])]
    tried = [Trial(kind=kind, rank=1, step=step, micro_batch=0, layout=PAIR) for kind, step in given]
    undisturbed = quiet(setting(None, QUIET, steps))
    results, missed = play_series(
        Series(trials=tuple(tried)), lambda steps: undisturbed, etcd=job_etcd, workdir=tmp_path / "job", steps=steps
    )
    assert not missed
    assert [result.broken for result in results] == [(), ()]
    assert all(result.named and result.classed and result.same_bits for result in results), results
    assert not any(result.again for result in results)


@pytest.mark.long
def test_a_node_that_holds_the_others_up_twice_is_set_aside_and_a_spare_fills(
    job_etcd: EtcdServer, quiet: Quiet, tmp_path: Path
) -> None:
    """The first time it stays; the second time the next generation has the spare in its place, and the same bits."""
    calm = setting(None, PAIR, 16)
    faults = ("--fault=stop:1@5", "--fault=stop:1@10")
    given = replace(calm, nodes=3, options=(*calm.options, *faults))
    outcome = play(given, etcd=job_etcd, workdir=tmp_path)
    logs = "\n".join(outcome.logs.values())
    assert not outcome.failure, (outcome.failure, logs)
    first, second, third = outcome.picture.generations
    assert [view.cause for view in (first, second, third)] == ["start", "stuck", "stuck"], logs
    marks = [json.loads((tmp_path / "out" / mark_of(step)).read_text())["node"] for step in (5, 10)]
    culprit, spare = first.nodes[1], first.spares[0]
    assert marks == [culprit, culprit]
    assert set(second.nodes) == set(first.nodes)
    assert set(third.nodes) == {first.nodes[0], spare}
    assert outcome.digest == quiet(calm).digest


@pytest.mark.long
def test_a_script_that_stops_at_the_same_place_twice_ends_with_what_was_found(
    job_etcd: EtcdServer, tmp_path: Path
) -> None:
    """Trying a third time would not help; every node says which rank left the program, and where."""
    calm = setting(None, PAIR, 12)
    # It goes on from step 3, so that its generation knows its own pace when it comes to step 5 again.
    more = ("--fault=order:1@5", "--again", "--snapshot-every=3", "--checkpoint-every=0")
    given = replace(calm, options=(*calm.options, *more))
    outcome = play(given, etcd=job_etcd, workdir=tmp_path)
    logs = "\n".join(outcome.logs.values())
    assert [view.cause for view in outcome.picture.generations] == ["start", "stuck"], logs
    assert set(outcome.exit_codes.values()) == {1}
    assert outcome.picture.step == 5
    said = " ".join(outcome.picture.errors) + logs
    assert "rank 1 of" in said
    assert "Mend the script" in said


@pytest.mark.slow
def test_a_node_whose_trainer_cannot_be_killed_leaves_for_good(
    job_etcd: EtcdServer, quiet: Quiet, tmp_path: Path
) -> None:
    """It says why, and the spare takes its place; the bits are those of a job that nothing happened to."""
    calm = setting(None, PAIR, 100)
    files = HungFiles(tmp_path / "hung")
    try:
        files.__enter__()
    except OSError as error:
        pytest.skip(f"no FUSE file system can be mounted here: {error}")

    def watch(picture: Picture) -> None:
        # Its processes are still there when it has left: they end with what they wait for.
        if picture.ended:
            files.release()

    try:
        faults = ("--fault=unkillable:1@5", f"--hung={files.folder}")
        given = replace(calm, nodes=3, options=(*calm.options, *faults))
        outcome = play(given, etcd=job_etcd, workdir=tmp_path / "job", watch=watch)
    finally:
        files.release()
    logs = "\n".join(outcome.logs.values())
    assert not outcome.failure, (outcome.failure, logs)
    first, *_, last = outcome.picture.generations
    culprit, spare = first.nodes[1], first.spares[0]
    assert set(last.nodes) == {first.nodes[0], spare}
    assert {name for name, code in outcome.exit_codes.items() if code} == {culprit}
    assert "trainer.unkillable" in outcome.logs[culprit]
    assert "s after SIGKILL" in outcome.logs[culprit]
    assert outcome.digest == quiet(calm).digest


@pytest.mark.long
def test_ctrl_c_ends_the_card_and_all_its_jobs(tmp_path: Path) -> None:
    """Whatever its lanes are at; that nothing of them is left is checked after every test."""
    out = tmp_path / "out"
    command = [str(Path(sys.executable).with_name("elastic3d")), "chaos", "score", "--kind=stop", f"--out={out}"]
    # A shell's background jobs ignore SIGINT, and so would their children.
    heeding = functools.partial(signal.signal, signal.SIGINT, signal.default_int_handler)
    with (
        (tmp_path / "said").open("w") as said,
        subprocess.Popen(command, stdout=said, stderr=said, preexec_fn=heeding) as card,
    ):
        try:
            assert wait_until(lambda: any(out.glob("*/events/*.jsonl")), 200), (tmp_path / "said").read_text()
            card.send_signal(signal.SIGINT)
            assert card.wait(100) != 0
        finally:
            card.kill()

"""Layouts beyond pp and dp, in real jobs that lose a node."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from chaos.faults.moment import When
from chaos.faults.process import Kill
from chaos.playing.play import play
from chaos.servers.etcd import EtcdServer
from elastic3d.calibration.record import save
from elastic3d.values import Layout, Schedule
from tests.calibration.test_record import CALIBRATION, LINK
from tests.histories.conftest import Quiet
from tests.histories.test_histories import FIVE, SMALL, faults, held

pytestmark = [pytest.mark.etcd, pytest.mark.gloo, pytest.mark.timeout(420), pytest.mark.long]

TENSOR = Path(__file__).parent / "scripts" / "train_tensor.py"
CONTEXT = Path(__file__).parent / "scripts" / "train_context.py"


def test_tensor_parallel_layers_survive_the_loss_of_a_node(job_etcd: EtcdServer, quiet: Quiet, tmp_path: Path) -> None:
    """Parts of layers, cut by tp and then by dp, come from memory into another dp of the same tp."""
    small = replace(SMALL, steps=8, global_batch=6, options=(*SMALL.options, "--pause=0.25"))
    setting = replace(small, nodes=2, slots=2, layout=Layout(tp=2), script=TENSOR)
    outcome = held(play(setting, faults("1@4"), etcd=job_etcd, workdir=tmp_path / "job"), quiet(setting))
    assert [view.cause for view in outcome.picture.generations] == ["start", "death"]
    assert outcome.picture.generations[1].restored_from == "memory"


@pytest.mark.slow
def test_shared_sequences_survive_the_loss_of_a_node(job_etcd: EtcdServer, quiet: Quiet, tmp_path: Path) -> None:
    """The remaining node goes on with cp 2, and ends with the bits of a job that no two ranks share a sequence in."""
    small = replace(SMALL, steps=8, global_batch=8, options=(*SMALL.options, "--pause=0.25"))
    setting = replace(small, nodes=2, slots=2, layout=Layout(cp=2), script=CONTEXT)
    undisturbed = quiet(replace(setting, layout=Layout(pp=1)))
    outcome = held(play(setting, faults("1@4"), etcd=job_etcd, workdir=tmp_path / "job"), undisturbed)
    assert [view.cause for view in outcome.picture.generations] == ["start", "death"]
    assert [(view.layout["dp"], view.layout["cp"]) for view in outcome.picture.generations] == [(2, 2), (1, 2)]
    assert outcome.picture.generations[1].restored_from == "memory"


@pytest.mark.parametrize(
    "layout",
    [
        Layout(pp=2, zero=2, schedule=Schedule.ZBV, virtual=2),
        pytest.param(Layout(pp=1, replicas=2), marks=pytest.mark.slow),
        pytest.param(Layout(pp=2, schedule=Schedule.GPIPE, cuts=(2,), zero=1), marks=pytest.mark.slow),
    ],
    ids=Layout.request,
)
def test_schedules_and_replicas_survive_the_loss_of_a_node(
    layout: Layout, job_etcd: EtcdServer, quiet: Quiet, tmp_path: Path
) -> None:
    """Two of the remaining three go on, one waits; the bits are those of the planner's own choice."""
    setting = replace(FIVE, layout=layout)
    outcome = held(play(setting, faults("1@8"), etcd=job_etcd, workdir=tmp_path / "job"), quiet(FIVE))
    assert outcome.picture.generations[1].restored_from == "memory"


def test_a_replica_is_a_copy_of_the_state_as_well(job_etcd: EtcdServer, quiet: Quiet, tmp_path: Path) -> None:
    """A node and its buddy die at once, a whole replica: what the other one holds is enough, of its newest step."""
    setting = replace(SMALL, layout=Layout(pp=1, replicas=2))
    both = [Kill(node=f"rank{rank}", when=When(step=10)) for rank in (0, 1)]
    outcome = held(play(setting, both, etcd=job_etcd, workdir=tmp_path / "job"), quiet(SMALL))
    assert outcome.picture.generations[-1].restored_from == "memory"
    steps = [step.number for step in outcome.picture.steps]
    assert steps == list(range(1, SMALL.steps + 1))


def test_a_calibrated_run_is_planned_by_its_calibration(job_etcd: EtcdServer, quiet: Quiet, tmp_path: Path) -> None:
    """Where links cost almost nothing, four nodes use no pipeline with its bubbles; without calibration they do."""
    file = tmp_path / "profile.json"
    fast = replace(LINK, latency=1e-6, bandwidth=1e12)
    save(replace(CALIBRATION, cores=0, flops=1e9, inside=fast, between=fast, block=None), file)
    small = replace(SMALL, global_batch=8)  # a micro-batch for each of four nodes
    setting = replace(small, options=(*small.options, f"--calibration={file}"))
    outcome = held(play(setting, faults("1@8"), etcd=job_etcd, workdir=tmp_path / "job"), quiet(small))
    layouts = [view.layout for view in outcome.picture.generations]
    assert [(layout["pp"], layout["dp"]) for layout in layouts] == [(1, 4), (1, 3)]

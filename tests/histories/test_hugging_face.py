"""A script of transformers in real jobs: elastic3d's Trainer goes on where a node was lost, with the same bits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from chaos.playing.play import play
from chaos.servers.etcd import EtcdServer
from elastic3d.values import Layout
from tests.histories.conftest import Quiet
from tests.histories.test_histories import SMALL, faults, held

pytestmark = [pytest.mark.etcd, pytest.mark.gloo, pytest.mark.timeout(420), pytest.mark.long]

SCRIPT = Path(__file__).parent / "scripts" / "hugging_face.py"


def test_the_only_training_node_is_killed(job_etcd: EtcdServer, quiet: Quiet, tmp_path: Path) -> None:
    """A node that only waited makes all steps that are left; callbacks, schedule and logs go on with the run."""
    setting = replace(SMALL, script=SCRIPT, nodes=2, layout=Layout(pp=1, dp=1))
    undisturbed = quiet(replace(setting, nodes=1))
    # Nobody else has a snapshot: by then the checkpoint of step 5 is in the store, however busy the machine is.
    outcome = held(play(setting, faults("stage0@14"), etcd=job_etcd, workdir=tmp_path / "job"), undisturbed)
    assert [view.cause for view in outcome.picture.generations] == ["start", "death"]
    assert len(outcome.killed) == 1


def test_one_of_three_nodes_is_killed(job_etcd: EtcdServer, quiet: Quiet, tmp_path: Path) -> None:
    """Stages and replicas are laid out anew; the bits are those of one node."""
    undisturbed = quiet(replace(SMALL, script=SCRIPT, nodes=1, layout=Layout(pp=1, dp=1)))
    setting = replace(SMALL, script=SCRIPT, nodes=3)
    held(play(setting, faults("1@8"), etcd=job_etcd, workdir=tmp_path / "job"), undisturbed)

"""Two hundred drawn histories: long, and not part of make test."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from chaos.playing.play import play
from chaos.schedules.draw import draw
from chaos.servers.etcd import EtcdServer
from tests.histories.conftest import Quiet
from tests.histories.test_histories import SMALL, held

pytestmark = [pytest.mark.slow, pytest.mark.etcd, pytest.mark.gloo, pytest.mark.timeout(420), pytest.mark.long]


@pytest.mark.parametrize("seed", range(200))
def test_a_drawn_history_ends_with_the_same_bits(seed: int, job_etcd: EtcdServer, quiet: Quiet, tmp_path: Path) -> None:
    """Any cluster with any faults gives the bits of four undisturbed nodes."""
    history = draw(seed, SMALL.steps)
    setting = dataclasses.replace(SMALL, nodes=history.nodes, slots=history.slots)
    outcome = play(setting, history.faults, etcd=job_etcd, workdir=tmp_path / "job")
    # A moment drawn as a generation may never come: the job may end before it, or seal fewer generations.
    undone = tuple(fault for fault in outcome.undone if not fault.when.generation)
    held(dataclasses.replace(outcome, undone=undone), quiet(SMALL))

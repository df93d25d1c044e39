"""What all histories share: one etcd, one undisturbed run per job to compare with, one process that forks agents."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from chaos.cluster import started_by
from chaos.etcd import EtcdServer
from chaos.play import Outcome, Setting, play
from chaos.preloaded import PreloadedServer

Quiet = Callable[[Setting], Outcome]


@pytest.fixture(autouse=True)
def agents(preloaded: PreloadedServer) -> Iterator[None]:
    """Fork the agents of these tests, unless a test says otherwise."""
    with started_by(preloaded):
        yield


@pytest.fixture(scope="session")
def job_etcd() -> Iterator[EtcdServer]:
    """Run one etcd for the undisturbed runs and the histories that leave it alone."""
    with EtcdServer() as server:
        yield server


@pytest.fixture(scope="session")
def quiet(job_etcd: EtcdServer) -> Iterator[Quiet]:
    """Return the undisturbed run of a setting, played once per session."""
    folder = Path(tempfile.mkdtemp(prefix="elastic3d-quiet-"))
    outcomes: dict[str, Outcome] = {}

    def run(setting: Setting) -> Outcome:
        key = repr(setting)
        if key not in outcomes:
            outcomes[key] = play(setting, etcd=job_etcd, workdir=folder / str(len(outcomes)), name="quiet")
        return outcomes[key]

    yield run
    shutil.rmtree(folder, ignore_errors=True)

"""Fixtures of all histories: one etcd, one undisturbed run per job to compare with, one process that forks agents."""

from __future__ import annotations

import fcntl
import hashlib
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from chaos.machine.cluster import started_by
from chaos.machine.preloaded import PreloadedServer
from chaos.playing.outcome import Outcome
from chaos.playing.play import play
from chaos.playing.setting import Setting
from chaos.servers.etcd import EtcdServer

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
def quiet(job_etcd: EtcdServer, tmp_path_factory: pytest.TempPathFactory) -> Quiet:
    """Return the undisturbed run of a setting, played once for all processes of a test run."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    outcomes: dict[str, Outcome] = {}

    def run(setting: Setting) -> Outcome:
        key = hashlib.sha256(repr(setting).encode()).hexdigest()[:16]
        if key not in outcomes:
            with open(folder / f"quiet-{key}.lock", "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                outcomes[key] = _played(setting, job_etcd, folder / f"quiet-{key}")
        return outcomes[key]

    return run


def _played(setting: Setting, etcd: EtcdServer, folder: Path) -> Outcome:
    """Return the run that another process has left; play it if there is none."""
    kept = folder / "outcome"
    if kept.exists():
        outcome: Outcome = pickle.loads(kept.read_bytes())
        return outcome
    played = play(setting, etcd=etcd, workdir=folder / "job", name="quiet")
    kept.write_bytes(pickle.dumps(played))
    return played

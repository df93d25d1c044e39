"""The server that forks the ranks of worlds, started before any test so that no test seems to leave it behind."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from multiprocessing import forkserver

import pytest

from tests.checkpointing.interchange.worlds import PRELOAD


@pytest.fixture(scope="session")
def server() -> Iterator[None]:
    """A process that has imported torch and has no thread."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOAD)
    forkserver.ensure_running()
    yield
    forkserver._forkserver._stop()  # type: ignore[attr-defined]

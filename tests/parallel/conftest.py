"""Starts the server that forks all worlds before any test counts processes, so that each test can run alone."""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing import forkserver

import pytest

from tests.parallel.worlds import PRELOAD


@pytest.fixture(scope="session", autouse=True)
def server() -> None:
    """Start the server; it ends with this process."""
    os.environ["OMP_NUM_THREADS"] = "1"
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOAD)
    forkserver.ensure_running()

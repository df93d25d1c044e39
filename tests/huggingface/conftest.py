"""Starts the server that forks all worlds, with transformers imported, which takes seconds, before any test runs."""

from __future__ import annotations

from tests.parallel.conftest import server
from tests.parallel.worlds import PRELOAD

PRELOAD.append("tests.training.stored")
PRELOAD.append("tests.parallel.architectures.families")

__all__ = ["server"]

"""Starts what all worlds are forked from, with transformers imported, which costs seconds, before any test counts."""

from __future__ import annotations

from tests.parallel.conftest import server
from tests.parallel.worlds import PRELOAD

PRELOAD.append("tests.parallel.architectures.mixtures")

__all__ = ["server"]

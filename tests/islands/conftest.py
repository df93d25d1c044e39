"""Worlds of ranks are forked by one server here."""

from __future__ import annotations

from tests.parallel.conftest import server

__all__ = ["server"]

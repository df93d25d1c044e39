"""Keepers as fixtures."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.worker.keepers import Nursery


@pytest.fixture(scope="session")
def _nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    nursery = Nursery(tmp_path_factory.mktemp("keepers"))
    yield nursery
    nursery.close()


@pytest.fixture
def nursery(_nursery: Nursery) -> Iterator[Nursery]:
    """Keepers that end with the test."""
    yield _nursery
    _nursery.clear()

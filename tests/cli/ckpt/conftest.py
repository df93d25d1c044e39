"""One history of checkpoints, written once for all tests that only read it."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from checkpointing import Store
from tests.cli.ckpt import scenes


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """Where the run's checkpoints are, and their names, oldest first."""

    url: str
    store: Store
    names: list[str]


@pytest.fixture(scope="session")
def history(tmp_path_factory: pytest.TempPathFactory) -> History:
    """A run of four checkpoints; nobody may write to it."""
    path = tmp_path_factory.mktemp("run")
    store, names = scenes.run(path)
    return History(url=str(path), store=store, names=names)

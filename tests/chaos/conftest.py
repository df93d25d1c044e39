"""Fixtures of the harness's tests."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest

from chaos.machine.small_disk import SmallDisk


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    """Mount a small file system; skip where none can be."""
    try:
        with SmallDisk(tmp_path / "disk") as disk:
            yield disk
    except OSError as error:
        if error.errno != errno.EPERM:
            raise
        pytest.skip(f"no file system can be mounted here: {error}")

"""The measurement of what a run reads that begins with weights, at a size that says nothing about speed."""

from __future__ import annotations

from pathlib import Path

import pytest

from chaos.bench import weights
from chaos.bench.weights import LAYOUTS, Size

pytestmark = [pytest.mark.slow, pytest.mark.etcd, pytest.mark.gloo]

SMALL = Size(width=256, depth=8)


@pytest.mark.parametrize("layout", [LAYOUTS[0], LAYOUTS[-1]])
def test_each_byte_of_the_files_is_asked_for_once_where_no_two_ranks_hold_the_same(layout: str, tmp_path: Path) -> None:
    """And once for each replica; from the disk it comes once, or not at all where its pages are kept in memory."""
    files = tmp_path / "weights"
    files.mkdir()
    weights.write(files, SMALL)
    begun = weights.begin(files, SMALL, layout, tmp_path / "run")
    times = 2 if "replicas" in layout else 1
    # What else is read is small: of the kernel's own files, and a sample of each tensor.
    assert times <= begun.asked / begun.nbytes < times + 0.5
    assert begun.fetched / begun.nbytes < 1.5
    assert weights.table({layout: [begun]}).row_count == 1

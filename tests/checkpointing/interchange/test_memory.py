"""A model need not fit in memory to be imported or exported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from checkpointing import open_store
from checkpointing.interchange import import_checkpoint
from tests.paths import ROOT

pytestmark = pytest.mark.long

LIMIT = 190 << 20
"""Parts of 16 MiB, what a save and a read have in flight, torch's own, and some air; the state is twice as large."""


def moved(what: str, kind: str, store: Path, path: Path) -> int:
    """Import or export in a process of its own; return the memory that took, in bytes."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.checkpointing.interchange.moved", what, kind, str(store), str(path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"},
        capture_output=True,
        text=True,
        check=True,
    )
    return int(done.stdout)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_whole_model_is_never_in_memory(tmp_path: Path) -> None:
    """400 MB are exported to every format and imported again in less than half that memory, mapped files included."""
    large = {f"w{n}": torch.full((40, 1024, 256), float(n)) for n in range(9)}
    torch.save(
        {"large": {**large, "turned": torch.ones(4096, 2048).t()}, "small": {"w": torch.ones(3)}}, tmp_path / "in.pt"
    )
    del large
    assert (tmp_path / "in.pt").stat().st_size > 390 << 20
    assert moved("import", "torch", tmp_path / "store", tmp_path / "in.pt") < LIMIT
    (tmp_path / "in.pt").unlink()
    for kind in ("torch", "dcp", "safetensors"):
        out = tmp_path / f"out.{kind}"
        assert moved("export", kind, tmp_path / "store", out) < LIMIT, kind
        assert moved("import", kind, tmp_path / f"again-{kind}", out) < LIMIT, kind


def test_memory_depends_on_the_batch_and_not_on_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each slab is read when its part is written, and parts are small."""
    from checkpointing.interchange import contents, foreign, transfer

    monkeypatch.setattr(transfer, "PART_BYTES", 8 << 20)
    monkeypatch.setattr(contents, "SLAB_TILES", 1)
    torch.save({"w": torch.ones(8, 1 << 20)}, tmp_path / "in.pt")
    held: list[int] = []
    read = foreign.Slab.read

    def watched(slab: foreign.Slab) -> memoryview:
        held.append(slab.nbytes)
        return read(slab)

    monkeypatch.setattr(foreign.Slab, "read", watched)
    done = import_checkpoint("torch", tmp_path / "in.pt", open_store(str(tmp_path / "store")))
    assert max(held) <= 4 << 20
    assert done.totals.bytes > 32 << 20
    manifests = list((tmp_path / "store" / "saves").rglob("*.manifest"))
    assert len(manifests) == 4

"""Bits change in the memory of snapshots, and nowhere else."""

from __future__ import annotations

import os
import subprocess
import sys

from chaos.machine.flips import APART, flip
from elastic3d.snapshots.arena import Arena

WRITTEN = 3 * APART + 1


def test_a_bit_changes_in_each_stretch_of_what_was_written() -> None:
    """What was never written stays without memory, and other files of the process as they are."""
    arena, other = Arena.create(), os.memfd_create("elastic3d-progress")
    try:
        os.write(other, bytes(WRITTEN))
        arena.reserve(64 << 20)
        arena.view(WRITTEN)[:] = bytes(WRITTEN)
        before = os.fstat(arena.descriptor).st_blocks
        changed = flip(os.getpid())
        data = bytes(arena.view(WRITTEN))
        assert [place for place, byte in enumerate(data) if byte] == [*range(APART // 2, WRITTEN, APART)]
        assert changed >= 3
        assert os.fstat(arena.descriptor).st_blocks == before
        assert os.pread(other, WRITTEN, 0) == bytes(WRITTEN)
    finally:
        os.close(other)
        os.close(arena.descriptor)


def test_a_process_that_is_gone_has_no_memory() -> None:
    """It may end at any moment."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    assert flip(process.pid) == 0

"""Shared memory without names: memfd segments that grow and never shrink.

Without a name nothing is left behind, whichever process dies, and no resource tracker of a killed trainer unlinks
memory that its keeper still needs. A seal against shrinking prevents one process from cutting short a mapping of
another.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os

NAME = "elastic3d"
"""What /proc calls a segment."""
_F_ADD_SEALS = 1033
_F_SEAL_SHRINK = 0x0002
_GRAIN = 2 << 20


class Arena:
    """One segment, as one process sees it. Not safe for several threads at once while it grows."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._mapping: mmap.mmap | None = None

    @classmethod
    def create(cls) -> Arena:
        """Return a new, empty segment."""
        descriptor = os.memfd_create(NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        fcntl.fcntl(descriptor, _F_ADD_SEALS, _F_SEAL_SHRINK)
        return cls(descriptor)

    @property
    def size(self) -> int:
        """Size of the segment in bytes."""
        return os.fstat(self.descriptor).st_size

    def reserve(self, nbytes: int) -> None:
        """Make the segment at least `nbytes` long."""
        if os.fstat(self.descriptor).st_size < nbytes:
            os.ftruncate(self.descriptor, -(-nbytes // _GRAIN) * _GRAIN)

    def view(self, nbytes: int) -> memoryview:
        """Return the first `nbytes`, mapped here; ValueError if the segment is shorter.

        A mapping with views that are still in use stays alive beside its successor.
        """
        if nbytes == 0:
            return memoryview(b"")
        if self._mapping is None or len(self._mapping) < nbytes:
            size = os.fstat(self.descriptor).st_size
            if size < nbytes:
                raise ValueError(f"a snapshot of {nbytes} bytes cannot lie in a segment of {size}")
            self._mapping = mmap.mmap(self.descriptor, size)
            # 2 MiB at a time are brought in faster than 512 pages. A system that has no huge pages for shared memory
            # (/sys/kernel/mm/transparent_hugepage/shmem_enabled) takes the advice, and gives the usual ones.
            with contextlib.suppress(OSError):
                self._mapping.madvise(mmap.MADV_HUGEPAGE)
        return memoryview(self._mapping)[:nbytes]

    def close(self) -> None:
        """Give up the segment in this process. Its memory lives while another process or a view holds it."""
        self._mapping = None
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

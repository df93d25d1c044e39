"""Faults of the disk that a store in a folder is on: it is full, or takes no writes."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

from chaos.faults.fault import About, Ends, Need, Place, Replay
from chaos.faults.live import LiveJob
from chaos.faults.spoilt_disk import OfDisk
from chaos.faults.store import UNWRITABLE, WITHOUT
from chaos.machine.small_disk import SmallDisk


def _about(enters: str) -> About:
    return About(
        place=Place.STORE,
        enters=enters,
        promised=WITHOUT,
        row=UNWRITABLE,
        detector="checkpoint.failed",
        needs=frozenset({Need.MOUNTS}),
        replay=Replay.TIMED,
        ends=Ends.NOTHING,
        sure=False,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class OfStoreDisk(OfDisk):
    """Something that lasts for `seconds` on the disk of a store in a folder."""

    @abstractmethod
    def spoil(self, disk: SmallDisk) -> bool:
        """Do it; return False where that is not possible yet."""

    def make(self, job: LiveJob) -> bool:
        """Do it for so long."""
        disk = job.store_disk
        if not self.spoil(disk):
            return False
        job.note(self.WORD)
        job.later(self.seconds, disk.restore)
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreDiskFull(OfStoreDisk):
    """The disk of a folder has no room for `seconds`."""

    WORD = "store-disk-full"
    ABOUT = _about("a file system of its own, mounted anew without room")

    def spoil(self, disk: SmallDisk) -> bool:
        """Leave no room."""
        disk.fill()
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreReadOnly(OfStoreDisk):
    """The disk of a folder takes no writes for `seconds`."""

    WORD = "store-read-only"
    ABOUT = _about("a file system of its own, mounted anew as read-only")

    def spoil(self, disk: SmallDisk) -> bool:
        """Refuse writes; not yet while a file is being written."""
        return disk.protect()


KINDS = (StoreDiskFull, StoreReadOnly)

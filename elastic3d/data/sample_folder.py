"""Samples of one data set on a local disk, shared by all processes of a node, within a bound of bytes.

    FOLDER/
      lock                held while bytes are counted, never while a sample is written
      SET/                one for each data set and version
        used              locked, shared, by every process that uses the set; its time says when one last began to
        bytes             of the set's files, 8 bytes, little-endian: counted before they are written
        parts/            files that are being written: RANDOM-BYTES
        00/ to ff/        samples by the last byte of their number: a digest of 32 bytes, and what `sample_bytes` makes

A sample appears whole or not at all: it is written under `parts` and then linked, so that of several processes that
make the same one the first wins. Nothing is synced: what a power cut leaves is found by its digest, which also covers
the set and the number, so that a file in the wrong place is no sample.

A set that nobody uses is deleted, the longest unused first, when room is needed. A set in use keeps what it has and
takes no more. Each sample is asked for once in an epoch, in another order each time: with room for half of them, those
that are there give half the samples of each epoch, while always keeping the newest would give an eighth (the samples
whose two places in the orders of two epochs are less than half an epoch apart). The locks are flocks: they end with
their processes, however these end.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import torch
from blake3 import blake3

DIGEST: Final = 32
"""Bytes of a digest, at the beginning of each file."""

_GONE: Final = "gone-"


class Damaged(Exception):
    """A sample's file is not as it was written. Never leaves this package."""


class SampleFolder:
    """The samples of one set. Methods raise OSError where the disk refuses; safe in several threads and processes.

    name: of the set, for file names. limit: bytes that the files of all sets of the folder may have.
    """

    def __init__(self, folder: Path, name: str, limit: int) -> None:
        self._folder, self._set, self._limit = folder, folder / name, limit
        folder.mkdir(parents=True, exist_ok=True)
        with self._locked():
            (self._set / "parts").mkdir(parents=True, exist_ok=True)
            used = os.open(self._set / "used", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            weakref.finalize(self, os.close, used)
            os.utime(used)
            if _alone(used):
                self._tidy()
            fcntl.flock(used, fcntl.LOCK_SH)
        for left in folder.glob(f"{_GONE}*"):
            shutil.rmtree(left, ignore_errors=True)

    def get(self, number: int) -> torch.Tensor | None:
        """Return a sample's bytes, 1-D uint8, None if it is not there; Damaged, after which it is gone."""
        path = self._path(number)
        try:
            file = open(path, "rb", buffering=0)  # noqa: SIM115  # closed below; only its opening may find nothing
        except FileNotFoundError:
            return None
        with file:
            size = os.fstat(file.fileno()).st_size
            digest = file.read(DIGEST)
            data = torch.empty(max(0, size - DIGEST), dtype=torch.uint8)
            view = data.numpy().data
            while view and (read := file.readinto(view)):
                view = view[read:]
        if view or digest != self._digest(number, data.numpy().data):
            # Of several that find it, one takes it away.
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
                self._count(-size)
            raise Damaged(f"its file of {size} bytes does not have the digest that it was written with")
        return data

    def has(self, number: int) -> bool:
        """Return whether a sample is there, whole or damaged."""
        return self._path(number).exists()

    def put(self, number: int, data: bytes) -> bool:
        """Keep a sample; False if there is no room. Nothing happens if it is there already."""
        path, size = self._path(number), DIGEST + len(data)
        if self.has(number):
            return True
        if not self._count(size):
            return False
        part = self._set / "parts" / f"{secrets.token_hex(8)}-{size}"
        kept = False
        try:
            with open(part, "xb", buffering=0) as file:
                for chunk in (self._digest(number, data), data):
                    view = memoryview(chunk)
                    while view:
                        view = view[file.write(view) :]
            path.parent.mkdir(exist_ok=True)
            with contextlib.suppress(FileExistsError):
                os.link(part, path)
                kept = True
        finally:
            part.unlink(missing_ok=True)
            if not kept:
                self._count(-size)
        return True

    def _path(self, number: int) -> Path:
        return self._set / f"{number & 0xFF:02x}" / str(number)

    def _digest(self, number: int, data: bytes | memoryview) -> bytes:
        return blake3(f"{self._set.name} {number} ".encode()).update(data).digest()

    def _count(self, size: int) -> bool:
        """Count bytes that are to be written, or are gone; False if they do not fit even without sets of no use."""
        gone: list[Path] = []
        with self._locked():
            own = _counted(self._set)
            others = sum(_counted(one) for one in self._others())
            if own + size <= self._limit < own + others + size:
                gone, others = self._evicted(others, self._limit - own - size)
            fits = size < 0 or own + others + size <= self._limit
            if fits:
                _write_count(self._set, own + size)
        for place in gone:
            shutil.rmtree(place, ignore_errors=True)
        return fits

    def _evicted(self, others: int, wanted: int) -> tuple[list[Path], int]:
        """Move unused sets out of the way until no more bytes than `wanted` are left; return where, and how many are.

        others: bytes of all sets but this one. The longest unused are first.
        """
        gone: list[Path] = []
        for one in sorted(self._others(), key=lambda each: (each / "used").stat().st_mtime_ns):
            if others <= wanted:
                break
            used = os.open(one / "used", os.O_RDWR | os.O_CLOEXEC)
            try:
                if _alone(used):
                    others -= _counted(one)
                    gone.append(self._moved(one))
            finally:
                os.close(used)
        return gone, others

    def _tidy(self) -> None:
        """Remove what processes that were killed have left, and all samples if they alone are above the bound now."""
        if _counted(self._set) > self._limit:
            for each in [one for one in self._set.iterdir() if one.is_dir()]:
                self._moved(each)
            (self._set / "parts").mkdir()
            _write_count(self._set, 0)
        for part in (self._set / "parts").glob("*-*"):
            size = part.name.rpartition("-")[2]
            # One that is linked already is a sample, and stays counted.
            counted = int(size) if size.isdecimal() and part.stat().st_nlink == 1 else 0
            part.unlink()
            _write_count(self._set, _counted(self._set) - counted)

    def _moved(self, place: Path) -> Path:
        """Move a folder that is to be deleted to where nobody looks for samples."""
        return place.rename(self._folder / f"{_GONE}{secrets.token_hex(8)}")

    def _others(self) -> list[Path]:
        """Return the folders of the other sets: nothing else has a file `used`."""
        return [path.parent for path in self._folder.glob("*/used") if _is_other(path.parent, self._set)]

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        # Opened anew each time: processes that were forked with one description would hold its lock together.
        lock = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            # Explicitly: a process that was forked meanwhile has the description open, too.
            fcntl.flock(lock, fcntl.LOCK_UN)
            os.close(lock)


def _is_other(place: Path, own: Path) -> bool:
    return place != own and not place.name.startswith(_GONE)


def _alone(used: int) -> bool:
    """Return whether nobody else has this file locked; it is locked for this description alone then."""
    try:
        fcntl.flock(used, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _counted(place: Path) -> int:
    try:
        return int.from_bytes((place / "bytes").read_bytes(), "little")
    except FileNotFoundError:
        return 0


def _write_count(place: Path, count: int) -> None:
    descriptor = os.open(place / "bytes", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        os.pwrite(descriptor, max(0, count).to_bytes(8, "little"), 0)
    finally:
        os.close(descriptor)

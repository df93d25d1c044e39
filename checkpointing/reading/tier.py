"""A local disk as a tier: tiles by digest, shared by the processes of a node, within a limit of bytes.

A tile is one file named by its digest, so that it is either right or recognised as wrong, whoever wrote it and however
the write was cut off: nothing is synced, and no file has another name first. The process that fetches a missing tile
claims its digest by a lock that the kernel drops with the process; others wait for it and read the file. The least
recently used files are deleted first.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from checkpointing.errors import SourceError, StoreUnfit, TileLost
from checkpointing.format.names import is_digest
from checkpointing.format.tiles import digest
from checkpointing.reading.sources import LITTLE, Distant, Filling, Offered, Prefetching, TileSource

_ROOM = 10  # eviction frees one part in so many of the limit
_Wanted = Sequence[tuple[Offered, memoryview]]
_Outcomes = list[tuple[int, SourceError | None]]


class DiskTier:
    """A directory of tiles in front of a more distant source, from which each tile is fetched once per node.

    Give it to `resolve` before that source, with `offers(...)` of the source's offers. A damaged file is replaced when
    the resolver has detected it. The directory may be removed at any time.
    """

    def __init__(
        self, path: str | Path, limit_bytes: int, *, behind: TileSource | None = None, name: str = "disk"
    ) -> None:
        """Open or make the directory; StoreUnfit if it cannot be written to.

        behind: the source of missing tiles; with None the tier only has the tiles it was given before.
        """
        if limit_bytes <= 0:
            raise ValueError(f"a disk tier's limit is a number of bytes from 1, not {limit_bytes}")
        self.name = name
        self._root = Path(path)
        self._limit = limit_bytes
        self._behind = behind
        self.little = behind.little if isinstance(behind, Distant) else LITTLE
        try:
            (self._root / "tiles").mkdir(parents=True, exist_ok=True)
            self._account(None)
        except OSError as error:
            raise StoreUnfit(
                f"disk tier {path}: cannot be written: {error.strerror}. Give a directory on a local disk that this "
                "user may write to"
            ) from error

    def offers(self, offers: Iterable[Offered]) -> Iterator[Offered]:
        """Yield the offers of the source behind as offers of this tier."""
        for tile in offers:
            yield Offered(spec=tile.spec, box=tile.box, digest=tile.digest, source=self.name, where=tile.where)

    def fetch(self, tile: Offered) -> memoryview:
        """Return the tile's bytes, from disk or from behind."""
        buffer = memoryview(bytearray(tile.nbytes))
        for _, error in self.fill([(tile, buffer)]):
            if error is not None:
                raise error
        return buffer

    def prefetch(self, tiles: Sequence[Offered]) -> None:
        """Fetch to the disk the tiles that are not there yet."""
        missing = [tile for tile in tiles if not self._has(tile)]
        for _ in self.fill([(tile, memoryview(bytearray(tile.nbytes))) for tile in missing]):
            pass

    def fill(self, wanted: _Wanted) -> Iterator[tuple[int, SourceError | None]]:
        """Read tiles into their destinations, after fetching to the disk those that are not there."""
        missing: dict[str, list[int]] = {}
        for number, (tile, buffer) in enumerate(wanted):
            if self._read(tile, buffer):
                yield number, None
            else:
                missing.setdefault(tile.digest, []).append(number)
        if not missing:
            return
        theirs = [number for _, *twins in missing.values() for number in twins]
        mine: list[int] = []
        with self._claims() as claims:
            for number in (first for first, *_ in missing.values()):
                (mine if claims.take(wanted[number][0].digest, wait=False) else theirs).append(number)
            outcomes = self._bring(wanted, mine)
        yield from outcomes
        for number in theirs:
            with self._claims() as claims:
                claims.take(wanted[number][0].digest, wait=True)
                outcomes = self._bring(wanted, [number])
            yield from outcomes

    def repair(self, tile: Offered, data: bytes | bytearray | memoryview) -> None:
        """Replace the bytes of a tile with these, already verified."""
        with self._claims() as claims:
            claims.take(tile.digest, wait=True)
            added = self._write(tile.digest, memoryview(data))
        if added:
            self._count(added)

    def _bring(self, wanted: _Wanted, numbers: Sequence[int]) -> _Outcomes:
        """Fill from disk the tiles that others have fetched by now, and the rest from behind; claims are held."""
        outcomes: _Outcomes = [(number, None) for number in numbers if self._read(*wanted[number])]
        there = {number for number, _ in outcomes}
        rest = [number for number in numbers if number not in there]
        added = 0
        for number, error in self._ask([(number, *wanted[number]) for number in rest]):
            tile, buffer = wanted[number]
            if error is None and digest(tile.spec, tile.box, buffer) != tile.digest:
                error = TileLost("the source behind the disk sent bytes without the digest they were offered with")
            if error is None:
                added += self._write(tile.digest, buffer)
            outcomes.append((number, error))
        if added:
            self._count(added)
        return outcomes

    def _ask(self, wanted: Sequence[tuple[int, Offered, memoryview]]) -> Iterator[tuple[int, SourceError | None]]:
        behind = self._behind
        if behind is None:
            yield from ((number, TileLost(f"is not on {self._root}")) for number, _, _ in wanted)
            return
        if isinstance(behind, Filling):
            for place, error in behind.fill([(tile, buffer) for _, tile, buffer in wanted]):
                yield wanted[place][0], error
            return
        if isinstance(behind, Prefetching):
            with contextlib.suppress(SourceError):
                behind.prefetch([tile for _, tile, _ in wanted])
        for number, tile, buffer in wanted:
            try:
                data = memoryview(behind.fetch(tile)).cast("B")
            except SourceError as error:
                yield number, error
                continue
            if data.nbytes == buffer.nbytes:
                buffer[:] = data
                yield number, None
            else:
                yield number, TileLost(f"the source behind the disk sent {data.nbytes} bytes, not {buffer.nbytes}")

    def _path(self, tile_digest: str) -> str:
        assert is_digest(tile_digest), "offers have been checked"
        return f"{self._root}/tiles/{tile_digest[:2]}/{tile_digest}"

    def _has(self, tile: Offered) -> bool:
        try:
            return os.stat(self._path(tile.digest)).st_size == tile.nbytes
        except OSError:
            return False

    def _read(self, tile: Offered, buffer: memoryview) -> bool:
        """Fill the buffer from disk; False if the file is not there, or not complete."""
        try:
            descriptor = os.open(self._path(tile.digest), os.O_RDONLY | os.O_CLOEXEC)
            try:
                if os.fstat(descriptor).st_size != tile.nbytes:
                    return False
                done = 0
                while done < tile.nbytes:
                    got = os.preadv(descriptor, [buffer[done:]], done)
                    if not got:
                        return False
                    done += got
                with contextlib.suppress(PermissionError):
                    os.utime(descriptor)
                return True
            finally:
                os.close(descriptor)
        except OSError:
            return False  # a failing disk counts as none

    def _write(self, tile_digest: str, data: memoryview) -> int:
        """Write a tile's file; return its size, 0 if that was not possible: a full disk must not stop a restore."""
        if data.nbytes > self._limit:
            return 0
        path, data = self._path(tile_digest), data.cast("B")
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            # Readers of the old file go on reading it.
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                done = 0
                while done < data.nbytes:
                    done += os.write(descriptor, data[done:])
            finally:
                os.close(descriptor)
            return done
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(path)
            return 0

    def _count(self, added: int) -> None:
        with contextlib.suppress(OSError):  # what is not counted now will be when a process opens the tier
            self._account(added)

    def _account(self, added: int | None) -> None:
        """Count the bytes added, None to count all that are there, and evict if they are too many."""
        descriptor = os.open(self._root / "usage", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            text = os.pread(descriptor, 32, 0)
            # Bytes that a dead process did not count are found when all is counted anew: at opening, and above the
            # limit.
            used = int(text) + added if added is not None and text.isdigit() else self._used()
            if used > self._limit:
                used = self._evict()
            os.pwrite(descriptor, f"{used:032d}".encode(), 0)
        finally:
            os.close(descriptor)

    def _files(self) -> Iterator[tuple[float, int, str]]:
        for folder, _, files in os.walk(self._root / "tiles"):
            for file in files:
                with contextlib.suppress(FileNotFoundError):
                    stat = os.stat(f"{folder}/{file}")
                    yield stat.st_mtime, stat.st_size, f"{folder}/{file}"

    def _used(self) -> int:
        return sum(size for _, size, _ in self._files())

    def _evict(self) -> int:
        files = sorted(self._files())
        used = sum(size for _, size, _ in files)
        for _, size, path in files:
            if used <= self._limit - self._limit // _ROOM:
                break
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            used -= size
        return used

    @contextlib.contextmanager
    def _claims(self) -> Iterator[_Claims]:
        try:
            descriptor = os.open(self._root / "claims", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:
            yield _Claims(None)  # the directory is gone or its disk broken: nothing is shared then
            return
        try:
            yield _Claims(descriptor)
        finally:
            os.close(descriptor)


class _Claims:
    """Locks on single bytes of a file, one per digest, held until the file is closed, by this thread or by its death.

    They belong to the open file, not to the process, so that threads exclude one another like processes.
    """

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor

    def take(self, tile_digest: str, *, wait: bool) -> bool:
        """Lock a digest; False if another holds it and `wait` is not set. Where locks fail nothing is shared."""
        if self._descriptor is None:
            return True
        place = int(tile_digest[:15], 16)
        lock = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, place, 1, 0)
        try:
            fcntl.fcntl(self._descriptor, fcntl.F_OFD_SETLKW if wait else fcntl.F_OFD_SETLK, lock)
        except OSError as error:
            return error.errno not in (errno.EAGAIN, errno.EACCES)
        return True

"""A directory as a store, on a local or a shared file system.

A new object is written to a scratch file, synced, and given its name by link(2), which fails if the name is taken,
or by rename(2), which replaces. Compare-and-swap happens under an flock'd file; its token is the digest of the
content, which the write-id in it makes unique. A killed writer leaves only a scratch file, which is recognised by its
free lock and removed by the next store that is opened for writing.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import secrets
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

from checkpointing.errors import StoreDenied, StoreError, StoreFull, StoreNotFound, StoreUnfit
from checkpointing.format.encoding import hexdigest
from checkpointing.stores.checking import Sent
from checkpointing.stores.protocol import Data, Entry, Versioned, check_name, chunks

_SCRATCH = "tmp"
_LOCK = "lock"
_VECTOR = 1024  # buffers that one call takes


class LocalStore:
    """Objects as files below a directory."""

    verifies = True  # write(2) and fsync(2) say what went wrong; reading back would ask the page cache

    def __init__(self, root: Path, *, create: bool = True) -> None:
        """Open the directory; with `create` it is made where missing, and dead writers' scratch files removed."""
        self._root = root
        self._threads = threading.Lock()
        if create:
            try:
                _make_directory(root)
                _make_directory(root / _SCRATCH)
                self._sweep_scratch()
            except OSError as error:
                raise StoreUnfit(
                    f"store {root}: cannot be written: {error.strerror}. Give a directory this user may write to."
                ) from error
        elif not root.is_dir():
            raise StoreUnfit(f"store {root}: there is no such directory")

    @property
    def url(self) -> str:
        """The directory."""
        return str(self._root)

    def get(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Return bytes [start, stop) of an object."""
        with self._errors("read", name), open(self._path(name), "rb", buffering=0) as file:
            file.seek(start)
            wanted = -1 if stop is None else max(0, stop - start)
            data = file.read(wanted)
            # One read returns less than asked only at the end, past 2 GiB, or on a signal.
            while wanted < 0 or len(data) < wanted:
                more = file.read(-1 if wanted < 0 else wanted - len(data))
                if not more:
                    break
                data += more
            return data

    def read_into(self, name: str, start: int, buffers: Sequence[memoryview]) -> int:
        """Fill buffers one after another with bytes from `start` on; return how many there were, fewer at its end."""
        with self._errors("read", name):
            descriptor = os.open(self._path(name), os.O_RDONLY | os.O_CLOEXEC)
            try:
                left, total = deque(buffers), 0
                while left:
                    got = os.preadv(descriptor, list(itertools.islice(left, _VECTOR)), start + total)
                    if not got and any(buffer.nbytes for buffer in left):
                        break
                    total += got
                    while left and got >= left[0].nbytes:
                        got -= left.popleft().nbytes
                    if got:
                        left[0] = left[0][got:]
                return total
            finally:
                os.close(descriptor)

    def read(self, name: str) -> Versioned | None:
        """Return an object with its token, None if it is not there."""
        try:
            data = self.get(name)
        except StoreNotFound:
            return None
        return Versioned(data=data, token=hexdigest(data))

    def size(self, name: str) -> int:
        """Return an object's bytes."""
        with self._errors("read", name):
            return self._path(name).stat().st_size

    def put(self, name: str, data: Data, *, check: bool = False) -> None:
        """Write an object, durably, replacing what was there; `check` reads it back."""
        sent = Sent(data) if check else None
        with self._errors("write", name):
            path = self._prepare(name)
            with self._scratch(data if sent is None else sent) as scratch:
                os.rename(scratch, path)
            _sync_directory(path.parent)
        if sent is not None:
            sent.compare(self, name)

    def put_if_absent(self, name: str, data: bytes) -> bool:
        """Create an object, durably; False if one was there."""
        with self._errors("create", name):
            path = self._prepare(name)
            with self._scratch(data) as scratch:
                try:
                    os.link(scratch, path)
                except FileExistsError:
                    return False
                finally:
                    os.unlink(scratch)
            _sync_directory(path.parent)
            return True

    def compare_and_swap(self, name: str, expected: str | None, data: bytes) -> bool:
        """Replace an object if its token is `expected`."""
        if expected is None:
            return self.put_if_absent(name, data)
        with self._errors("swap", name), self._locked():
            found = self.read(name)
            if found is None or found.token != expected:
                return False
            self._replace(name, data)
            return True

    def list(self, prefix: str) -> Iterator[str]:
        """Yield the names that begin with `prefix`, sorted."""
        names: list[str] = []
        with self._errors("list", prefix):
            for directory, _, files in os.walk(self._root, onerror=_raise):
                relative = Path(directory).relative_to(self._root).as_posix()
                for file in files:
                    name = file if relative == "." else f"{relative}/{file}"
                    if name.startswith(prefix) and not name.startswith(f"{_SCRATCH}/") and name != _LOCK:
                        names.append(name)
        yield from sorted(names)

    def entries(self, prefix: str) -> Iterator[Entry]:
        """Yield the objects whose names begin with `prefix`, sorted by name; what vanishes meanwhile is left out."""
        for name in self.list(prefix):
            with self._errors("list", prefix), contextlib.suppress(FileNotFoundError):
                found = self._path(name).stat()
                yield Entry(name=name, size=found.st_size, modified=found.st_mtime)

    def delete(self, name: str) -> None:
        """Remove an object; nothing happens if it is not there."""
        with self._errors("delete", name):
            self._path(name).unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        return self._root / check_name(name)

    def _prepare(self, name: str) -> Path:
        path = self._path(name)
        _make_directory(path.parent)
        return path

    def _replace(self, name: str, data: bytes) -> None:
        path = self._path(name)
        # The lock is held: no sweep can meet the scratch file before it is locked itself.
        with self._write_scratch(self._open_scratch(), data) as scratch:
            os.rename(scratch, path)
        _sync_directory(path.parent)

    @contextlib.contextmanager
    def _scratch(self, data: Data) -> Iterator[str]:
        with self._locked():
            opened = self._open_scratch()
        with self._write_scratch(opened, data) as scratch:
            yield scratch

    def _open_scratch(self) -> tuple[int, str]:
        path = str(self._root / _SCRATCH / secrets.token_hex(12))
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        return descriptor, path

    @contextlib.contextmanager
    def _write_scratch(self, opened: tuple[int, str], data: Data) -> Iterator[str]:
        descriptor, path = opened
        try:
            for chunk in chunks(data):
                written = 0
                while written < chunk.nbytes:
                    written += os.write(descriptor, chunk[written:])
            os.fsync(descriptor)
            yield path
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(path)
            raise
        finally:
            os.close(descriptor)

    def _sweep_scratch(self) -> None:
        with self._locked():
            for entry in os.scandir(self._root / _SCRATCH):
                with contextlib.suppress(FileNotFoundError):
                    descriptor = os.open(entry.path, os.O_RDONLY | os.O_CLOEXEC)
                    try:
                        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        os.unlink(entry.path)
                    except BlockingIOError:
                        pass  # its writer lives
                    finally:
                        os.close(descriptor)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with self._threads:
            descriptor = os.open(self._root / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                yield
            finally:
                os.close(descriptor)

    @contextlib.contextmanager
    def _errors(self, verb: str, name: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            raise StoreNotFound(f"store {self._root}: cannot {verb} {name}: it is not there") from error
        except OSError as error:
            advice = {
                errno.ENOSPC: "; free space or give another directory",
                errno.EDQUOT: "; free space or give another directory",
                errno.EFBIG: "; raise the limit (ulimit -f) or give another directory",
                errno.EROFS: "; remount it writable or give another directory",
                errno.EACCES: "; check its permissions",
                errno.EPERM: "; check its permissions, and that the file system has hard links",
                errno.ENOTSUP: "; the file system must have hard links and flock",
            }.get(error.errno or 0, "")
            kind = {
                errno.ENOSPC: StoreFull,
                errno.EDQUOT: StoreFull,
                errno.EFBIG: StoreFull,
                errno.EACCES: StoreDenied,
                errno.EPERM: StoreDenied,
                errno.EROFS: StoreDenied,
            }.get(error.errno or 0, StoreError)
            raise kind(f"store {self._root}: cannot {verb} {name}: {error.strerror}{advice}") from error


def _raise(error: OSError) -> None:
    raise error


def _make_directory(path: Path) -> None:
    """Make a directory and its parents, each one durable before the next."""
    if path.is_dir():
        return
    if path.parent != path:
        _make_directory(path.parent)
    with contextlib.suppress(FileExistsError):
        path.mkdir()
    if not path.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
    _sync_directory(path.parent)


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

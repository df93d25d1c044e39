"""A directory as a store, on a local or a shared file system.

A new object is written to a scratch file, synced, and given its name by link(2), which fails if the name is taken, or
by rename(2), which replaces. Compare-and-swap is link(2) onto numbered names (`numbered.py`). Nothing waits for a lock:
any process that can open a file could hold its lock for ever, and on some mounts locks do not work at all.

A killed writer leaves only a scratch file, which the next store that is opened for writing removes: at once if it was
written on the same machine and its writer's lock on it is free, else if it has not changed for a day. A writer whose
scratch file was removed by such a guess gets an error, and writes it again.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import secrets
import stat
import uuid
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

from checkpointing.errors import StoreDenied, StoreError, StoreFull, StoreNotFound, StoreUnfit
from checkpointing.format import names
from checkpointing.format.encoding import hexdigest, moved
from checkpointing.stores.checking import Sent
from checkpointing.stores.numbered import newest, swap
from checkpointing.stores.protocol import Data, Entry, Versioned, check_name, chunks

_SCRATCH = "tmp"
_VERSIONS = "versions"
_LOCK = "lock"  # in stores from the time when swaps took a lock
_HIDDEN = (f"{_SCRATCH}/", f"{_VERSIONS}/")
_ABANDONED = 86400.0
_TRIES = 16
# What older software finds under the name of a swapped object, so that it neither reads nor writes it.
_MOVED = moved("ref", f"{_VERSIONS}/")
_VECTOR = 1024  # buffers that one call accepts


class LocalStore:
    """Objects as files below a directory."""

    verifies = True  # write(2) and fsync(2) report errors; reading back would only ask the page cache

    def __init__(self, root: Path, *, create: bool = True) -> None:
        """Open the directory; with `create` it is made if missing, and dead writers' scratch files are removed."""
        self._root = root
        self._machine = _machine()
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
        with self._errors("read", name), self._opened(name) as descriptor:
            left = os.fstat(descriptor).st_size - start if stop is None else stop - start
            pieces: list[bytes] = []
            while left > 0:
                # A read returns less than asked only at the end, past 2 GiB, or on a signal.
                piece = os.pread(descriptor, left, start)
                if not piece:
                    break
                pieces.append(piece)
                start += len(piece)
                left -= len(piece)
            return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def read_into(self, name: str, start: int, buffers: Sequence[memoryview]) -> int:
        """Fill buffers one after another with bytes from `start` on; return their number, which is less at the end."""
        with self._errors("read", name), self._opened(name) as descriptor:
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

    def read(self, name: str) -> Versioned | None:
        """Return an object with its token, None if it is not there."""
        with self._errors("read", name):
            version = newest(self._versions(name), f"store {self._root}: {name}")
        return version[1] if version is not None else None

    def size(self, name: str) -> int:
        """Return an object's bytes."""
        with self._errors("read", name), self._opened(name) as descriptor:
            return os.fstat(descriptor).st_size

    def put(self, name: str, data: Data, *, check: bool = False) -> None:
        """Write an object, durably, replacing what was there; `check` reads it back."""
        sent = Sent(data) if check else None
        with self._errors("write", name):
            versions = self._versions(name)
            path = self._prepare(name)
            with self._scratch(data if sent is None else sent) as scratch:
                if not any(versions.numbers()):
                    os.rename(scratch, path)
                    _sync_directory(path.parent)
                else:
                    for _ in range(_TRIES):
                        if versions.place(max(versions.numbers(), default=0) + 1, scratch):
                            break
                    else:
                        raise StoreError(f"store {self._root}: {name} is swapped all the time; try again")
                    os.unlink(scratch)
        if sent is not None:
            sent.compare(self, name)

    def put_if_absent(self, name: str, data: bytes) -> bool:
        """Create an object, durably; False if one was there."""
        with self._errors("create", name):
            path = self._prepare(name)
            if any(self._versions(name).numbers()):
                return False
            with self._scratch(data) as scratch:
                done = _link(scratch, path)
                os.unlink(scratch)
            _sync_directory(path.parent)
            return done

    def compare_and_swap(self, name: str, expected: str | None, data: bytes) -> bool:
        """Replace an object if its token is `expected`."""
        if expected is None:
            return self.put_if_absent(name, data)
        with self._errors("swap", name):
            done = swap(self._versions(name), expected, data, f"store {self._root}: {name}")
            if done:
                self._mark_moved(self._path(name))
            return done

    def list(self, prefix: str) -> Iterator[str]:
        """Yield the names that begin with `prefix`, sorted. What cannot be an object's name is somebody else's."""
        listed: list[str] = []
        # Only the folder that holds them all is listed: a store has many thousands of packs and few refs.
        folder = prefix.rpartition("/")[0]
        if folder and not _is_name(folder):
            return
        with self._errors("list", prefix):
            try:
                failed = self._unless_beside if not folder else _raise
                for directory, folders, files in os.walk(self._root / folder, onerror=failed, followlinks=True):
                    relative = Path(directory).relative_to(self._root).as_posix()
                    # Such as `lost+found` where a file system is mounted, which only root may enter.
                    folders[:] = [name for name in folders if _is_name(name) and self._is_within(directory, name)]
                    if relative == ".":
                        folders[:] = [name for name in folders if f"{name}/" not in _HIDDEN]
                    for file in files:
                        name = file if relative == "." else f"{relative}/{file}"
                        if name.startswith(prefix) and name != _LOCK and _is_name(file):
                            listed.append(name)
            except FileNotFoundError:
                # The folder was never made, or another one vanished meanwhile, which must not hide the rest.
                if (self._root / folder).is_dir():
                    raise
        yield from (name for name in sorted(listed) if not name.startswith(_HIDDEN))

    def entries(self, prefix: str) -> Iterator[Entry]:
        """Yield the objects whose names begin with `prefix`, sorted by name; those that vanish are left out."""
        for name in self.list(prefix):
            with self._errors("list", prefix), contextlib.suppress(FileNotFoundError):
                status = self._status(name)
                yield Entry(name=name, size=status.st_size, modified=status.st_mtime)

    def delete(self, name: str) -> None:
        """Remove an object; nothing happens if it is not there."""
        with self._errors("delete", name):
            versions = self._versions(name)
            # First the file under its own name: otherwise it would count again for a moment.
            self._path(name).unlink(missing_ok=True)
            for number in sorted(versions.numbers()):
                versions.remove(number)
            versions.close()

    def _is_within(self, directory: str, name: str) -> bool:
        """Return whether a folder is one of the store's: of links only those of its own, as of packs that were moved.

        A link to a folder above it would have no end.
        """
        path = Path(directory, name)
        if not path.is_symlink():
            return True
        own = path.relative_to(self._root).parts[0] in names.FOLDERS
        return own and not Path(directory).resolve().is_relative_to(path.resolve())

    def _unless_beside(self, error: OSError) -> None:
        """Raise the error, but for a folder beside the store's own that this user may not enter."""
        path = Path(error.filename)
        if not isinstance(error, PermissionError) or path.parent != self._root or path.name in names.FOLDERS:
            raise error

    def _path(self, name: str) -> Path:
        return self._root / check_name(name)

    def _prepare(self, name: str) -> Path:
        path = self._path(name)
        _make_directory(path.parent)
        return path

    def _versions(self, name: str) -> _Files:
        return _Files(self, self._path(name), self._root / _VERSIONS / name)

    @contextlib.contextmanager
    def _opened(self, name: str) -> Iterator[int]:
        """Open the file of the version that counts."""
        versions = self._versions(name)
        for last in [False] * _TRIES + [True]:
            number = max(versions.numbers(), default=0)
            try:
                descriptor = _open(versions.path(number))
            except FileNotFoundError:
                if last or (number == 0 and not any(versions.numbers())):
                    raise
                continue
            if number == 0 and any(versions.numbers()):
                os.close(descriptor)  # the first swap came in between
                continue
            break
        else:
            raise StoreError(f"store {self._root}: {name} changed under every read; try again")
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def _status(self, name: str) -> os.stat_result:
        try:
            with self._opened(name) as descriptor:
                return os.fstat(descriptor)
        except PermissionError:
            # One file that this user may not read, as of somebody with another umask, must not hide all others.
            try:
                status = os.stat(self._path(name))
            except PermissionError:
                if name.partition("/")[0] in names.FOLDERS:
                    raise
                raise FileNotFoundError(errno.ENOENT, "is somebody else's", name) from None
            if not stat.S_ISREG(status.st_mode):
                raise FileNotFoundError(errno.ENOENT, "is no file", name) from None
            return status

    def _mark_moved(self, path: Path) -> None:
        """Keep software that knows no versions away from an object that has some. The swap is done in any case."""
        with contextlib.suppress(OSError):
            if path.stat().st_size != len(_MOVED) or path.read_bytes() != _MOVED:
                with self._scratch(_MOVED) as scratch:
                    os.rename(scratch, path)
                _sync_directory(path.parent)

    @contextlib.contextmanager
    def _scratch(self, data: Data) -> Iterator[str]:
        descriptor, path = self._open_scratch()
        try:
            for chunk in chunks(data):
                written = 0
                while written < chunk.nbytes:
                    written += os.write(descriptor, chunk[written:])
            os.fsync(descriptor)
            try:
                yield path
            except FileNotFoundError as error:
                if os.path.exists(path):
                    raise
                raise StoreError(
                    f"store {self._root}: a scratch file was taken for a dead writer's and removed, as this process "
                    "stood still for long; write it again"
                ) from error
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(path)
            raise
        finally:
            os.close(descriptor)

    def _open_scratch(self) -> tuple[int, str]:
        while True:
            path = str(self._root / _SCRATCH / f"{self._machine}-{secrets.token_hex(12)}")
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            # The lock only shows that this writer is alive. Without one, its file is safe for a day.
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(descriptor).st_nlink:
                return descriptor, path
            os.close(descriptor)  # removed before it was locked

    def _sweep_scratch(self) -> None:
        now: float | None = None
        for entry in os.scandir(self._root / _SCRATCH):
            # Another user's file must be neither opened nor removed.
            with contextlib.suppress(FileNotFoundError, PermissionError):
                if entry.name.startswith(f"{self._machine}-") and _abandoned(entry.path):
                    os.unlink(entry.path)
                    continue
                now = now if now is not None else self._now()
                if now - entry.stat().st_mtime > _ABANDONED:
                    os.unlink(entry.path)

    def _now(self) -> float:
        """Return the time by the file system's clock."""
        descriptor, path = self._open_scratch()
        try:
            return os.fstat(descriptor).st_mtime
        finally:
            os.unlink(path)
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
                errno.ENOTSUP: "; the file system must have hard links",
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


class _Files:
    """The versions of one object, as files named by their numbers. Number 0 is the file under the object's own name."""

    def __init__(self, store: LocalStore, plain: Path, folder: Path) -> None:
        self._store, self._plain, self._folder = store, plain, folder

    def path(self, number: int) -> Path:
        """Return the path of a version."""
        return self._folder / str(number) if number else self._plain

    def numbers(self) -> list[int]:
        """Return the numbers from 1 on that are taken."""
        try:
            return [int(name) for name in os.listdir(self._folder) if name.isdigit()]
        except FileNotFoundError:
            return []

    def open(self, number: int) -> bytes | None:
        """Return a version's bytes, None if it is not there."""
        try:
            with os.fdopen(_open(self.path(number)), "rb") as file:
                return file.read()
        except FileNotFoundError:
            return None

    def link(self, number: int, data: bytes) -> bool:
        """Create a version, durably; False if the number is taken."""
        with self._store._scratch(data) as scratch:
            done = self.place(number, scratch)
            os.unlink(scratch)
        return done

    def place(self, number: int, scratch: str) -> bool:
        """Make a scratch file the version of this number; False if the number is taken."""
        _make_directory(self._folder)
        done = _link(scratch, self.path(number))
        _sync_directory(self._folder)
        return done

    def remove(self, number: int) -> None:
        """Remove a version; nothing happens if it is not there."""
        self.path(number).unlink(missing_ok=True)

    def close(self) -> None:
        """Remove the folder if it is empty."""
        with contextlib.suppress(OSError):
            self._folder.rmdir()


def _open(path: Path | str) -> int:
    """Open a file to read it; FileNotFoundError for what is none, as a pipe that nobody may ever write to."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise FileNotFoundError(errno.ENOENT, "is no file", str(path))


def _link(scratch: str, path: Path) -> bool:
    """Give a file another name; False if another file has it."""
    try:
        os.link(scratch, path)
    except FileExistsError:
        # Over a network an answer may be lost and the client repeat the request: then the name is this same file's.
        return os.path.exists(path) and os.path.samefile(scratch, path)
    return True


def _abandoned(scratch: str) -> bool:
    """Return whether nobody holds the lock on a scratch file; False where that cannot be told."""
    descriptor = _open(scratch)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False  # its writer is alive, another process holds the lock, or locks do not work on this mount
    finally:
        os.close(descriptor)
    return True


def _machine() -> str:
    """Return an id of this machine since its last start: only on it are the locks of dead writers surely free."""
    try:
        text = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        text = str(uuid.getnode())
    return hexdigest(text.encode())[:12]


def _is_name(text: str) -> bool:
    try:
        check_name(text)
    except ValueError:
        return False
    return True


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

"""Any fsspec file system as a store, if it has conditional writes.

Reading works with every protocol. Create-only writes and compare-and-swap are known for `s3` (the headers
If-None-Match and If-Match, through s3fs's `mode="create"` and `IfMatch`) and for `memory` (which lives in one process).
Packs are streamed through a file object; everything else is small and goes in one request. Where files are written in
place and a rename replaces in one step, that is to a scratch name first: a reader never has half of a ref, and a killed
writer leaves no half of a manifest.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import secrets
import threading
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import fsspec

from checkpointing.errors import (
    SET_THE_CLOCK,
    SKEWED,
    StoreDenied,
    StoreError,
    StoreNotFound,
    StoreUnfit,
    StoreUnreachable,
)
from checkpointing.format import names
from checkpointing.format.encoding import hexdigest
from checkpointing.stores.address import redacted
from checkpointing.stores.checking import Sent, miswritten
from checkpointing.stores.protocol import Data, Entry, Versioned, check_name, chunks

# Names of errors of botocore, aiohttp and Python itself.
_UNREACHABLE = ("EndpointConnectionError", "ConnectTimeoutError", "ClientConnectorError", "ConnectionRefusedError")
_RENAMING = ("sftp", "ssh", "local")  # their `mv` is rename(2), there or here
_BLOCK = 16 << 20  # of an upload in parts; S3 accepts 5 MiB to 5 GiB, and 10,000 of them


class _Conditional(Protocol):
    """How one protocol writes on a condition."""

    def token(self, path: str, data: bytes | None) -> str:
        """Return the token of the present object; "" if it is not known yet. data: the object, if it was just read."""
        ...

    def create(self, path: str, data: bytes) -> bool: ...
    def swap(self, path: str, expected: str, data: bytes) -> bool: ...


class FsspecStore:
    """Objects as files of an fsspec file system, below a prefix."""

    def __init__(self, url: str, *, options: Mapping[str, Any]) -> None:
        """Connect; StoreUnfit if the protocol is unknown or its package is missing."""
        self._url = redacted(url)
        protocol = url.partition("://")[0]
        try:
            # Listings are never cached: other hosts write to the same place.
            self._fs, root = fsspec.core.url_to_fs(url, use_listings_cache=False, **options)
        except ImportError as error:
            raise StoreUnfit(f"store {self._url}: {error}. Install the package that speaks {protocol}://") from error
        except (ValueError, TypeError, OSError) as error:
            raise StoreUnfit(f"store {self._url}: cannot be opened: {redacted(str(error))}") from error
        self._root = str(root).rstrip("/")
        if protocol in ("s3", "s3a") and not self._root:
            raise StoreUnfit(f"store {self._url}: name a bucket, as in s3://bucket/prefix")
        self._renaming = protocol in _RENAMING
        self._conditional: _Conditional | None = None
        if protocol in ("s3", "s3a"):
            self._conditional = _S3(self._fs)
        elif protocol == "memory":
            self._conditional = _Memory(self._fs)

    @property
    def url(self) -> str:
        """The URL it was opened with, without secrets."""
        return self._url

    def get(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Return bytes [start, stop) of an object."""
        path = self._path(name)
        if stop is not None and stop <= start:
            return b""
        with self._errors("read", name):
            # Unbounded reads are separate: s3fs asks for the size first if only one end is given.
            if start == 0 and stop is None:
                return bytes(self._fs.cat_file(path))
            try:
                return bytes(self._fs.cat_file(path, start=start, end=stop))
            except OSError as error:
                if _said(error, "416", "InvalidRange"):
                    return b""  # S3 has no empty answer to a range that begins at or after the end
                raise

    def read(self, name: str) -> Versioned | None:
        """Return an object with its token, None if it is not there."""
        path = self._path(name)
        try:
            with self._errors("read", name):
                if self._conditional is None:
                    # Nothing is swapped here: the token is that of the bytes, and only good for comparing.
                    data = bytes(self._fs.cat_file(path))
                    return Versioned(data=data, token=hexdigest(data))
                for _ in range(16):
                    # The token is read before and after the data, so that both are of one version.
                    before = self._conditional.token(path, None)
                    data = bytes(self._fs.cat_file(path))
                    after = self._conditional.token(path, data)
                    if before in (after, ""):
                        return Versioned(data=data, token=after)
        except StoreNotFound:
            return None
        raise StoreError(f"store {self._url}: {name} changed under every one of 16 reads; try again")

    def size(self, name: str) -> int:
        """Return an object's bytes."""
        path = self._path(name)
        with self._errors("read", name):
            return int(self._fs.info(path)["size"])

    def put(self, name: str, data: Data, *, check: bool = False) -> None:
        """Write an object, replacing what was there; chunks are uploaded in parts. `check` reads it back."""
        if check:
            sent = Sent(data)
            self.put(name, sent)
            sent.compare(self, name)
            return
        path = self._path(name)
        first, rest = _first_block(data)
        with self._errors("write", name):
            self._make_parents(path)
        if not self._renaming:
            self._write(name, path, first, rest)
            return
        # A collection deletes what a killed writer leaves under such a name. It lies in the store, and not where the
        # protocol has its temporary files, for a rename from another file system fails.
        scratch = self._path(f"{names.CLAIMS}{secrets.token_hex(32)}")
        try:
            with self._errors("write", name):
                self._make_parents(scratch)
            self._write(name, scratch, first, rest)
            with self._errors("write", name):
                self._fs.mv(scratch, path)
        except BaseException:
            with contextlib.suppress(Exception):
                self._fs.rm_file(scratch)
            raise

    def _write(self, name: str, path: str, first: bytes, rest: Iterator[memoryview] | None) -> None:
        """Write a file. name: of the object, for errors."""
        with self._errors("write", name):
            if rest is None:
                self._fs.pipe_file(path, first)
                return
            file = self._fs.open(path, "wb", block_size=_BLOCK, autocommit=self._renaming)
        try:
            for chunk in itertools.chain((memoryview(first),), rest):
                with self._errors("write", name):
                    file.write(chunk)
            with self._errors("write", name):
                file.close()
                if not self._renaming:
                    file.commit()
        except BaseException:
            with contextlib.suppress(Exception):
                file.close() if self._renaming else file.discard()
            # Leaving a `with` block would store the half that has been written.
            with contextlib.suppress(AttributeError):
                file.closed = True
            raise

    def put_if_absent(self, name: str, data: bytes) -> bool:
        """Create an object; False if one was there."""
        path = self._path(name)
        with self._errors("create", name):
            self._make_parents(path)
            return self._conditions().create(path, data)

    def compare_and_swap(self, name: str, expected: str | None, data: bytes) -> bool:
        """Replace an object if its token is `expected`."""
        if expected is None:
            return self.put_if_absent(name, data)
        path = self._path(name)
        with self._errors("swap", name):
            return self._conditions().swap(path, expected, data)

    def list(self, prefix: str) -> Iterator[str]:
        """Yield the names that begin with `prefix`, sorted."""
        for entry in self.entries(prefix):
            yield entry.name

    def entries(self, prefix: str) -> Iterator[Entry]:
        """Yield the objects whose names begin with `prefix`, sorted by name."""
        folder = prefix.rpartition("/")[0]
        try:
            with self._errors("list", prefix):
                infos = self._fs.find(f"{self._root}/{folder}".rstrip("/"), detail=True)
        except StoreNotFound:
            return
        lead = len(self._root) + 1
        for path in sorted(infos):
            name = path[lead:]
            if name.startswith(prefix):
                yield Entry(name=name, size=int(infos[path]["size"]), modified=_modified(infos[path]))

    def delete(self, name: str) -> None:
        """Remove an object; nothing happens if it is not there."""
        path = self._path(name)
        try:
            with self._errors("delete", name):
                self._fs.rm_file(path)
        except StoreNotFound:
            pass

    def _path(self, name: str) -> str:
        return f"{self._root}/{check_name(name)}"

    def _make_parents(self, path: str) -> None:
        # Object stores have no directories, and s3fs would try to create the bucket.
        if not isinstance(self._conditional, _S3):
            self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)

    def _conditions(self) -> _Conditional:
        if self._conditional is None:
            raise StoreUnfit(
                f"store {self._url}: this protocol has no create-only writes and no compare-and-swap that we know of, "
                "so an old leader could not be fenced. Use s3:// or a local or shared directory."
            )
        return self._conditional

    @contextlib.contextmanager
    def _errors(self, verb: str, name: str) -> Iterator[None]:
        try:
            yield
        except StoreError:
            raise
        except FileNotFoundError as error:
            if _said(error, "", "NoSuchBucket") or "bucket does not exist" in str(error):
                raise StoreUnfit(
                    f"store {self._url}: cannot {verb} {name}: there is no such bucket. Make it, or correct the URL."
                ) from error
            raise StoreNotFound(f"store {self._url}: cannot {verb} {name}: it is not there") from error
        except PermissionError as error:
            skewed = _said(error, "", SKEWED)
            why = SET_THE_CLOCK if skewed else f"{error}. Check the credentials, and what they may do there."
            raise StoreDenied(f"store {self._url}: cannot {verb} {name}: {why}") from error
        # The errors of network file systems are an open set (botocore, aiohttp, ...): this is the edge.
        except Exception as error:
            if "Checksum" in type(error).__name__:
                raise miswritten(self._url, name) from error  # botocore compares the checksum of the upload
            kind = StoreUnreachable if type(error).__name__ in _UNREACHABLE else StoreError
            raise kind(f"store {self._url}: cannot {verb} {name}: {type(error).__name__}: {error}") from error


def _first_block(data: Data) -> tuple[bytes, Iterator[memoryview] | None]:
    """Return what one request can carry, and the rest if there is any. Errors of the source are not caught."""
    pieces = chunks(data)
    block = bytearray()
    for piece in pieces:
        block += piece
        if len(block) > _BLOCK:
            return bytes(block), pieces
    return bytes(block), None


def _modified(info: Mapping[str, Any]) -> float:
    """Return when an object was written, by the names that fsspec's file systems have for that; 0 if there is none."""
    for field in ("LastModified", "last_modified", "updated", "mtime", "created"):
        value = info.get(field)
        if isinstance(value, datetime.datetime):
            return value.timestamp()
        if isinstance(value, int | float):
            return float(value)
    return 0.0


class _Memory:
    """Everything is in this process: a lock is enough."""

    _lock = threading.Lock()

    def __init__(self, fs: Any) -> None:
        self._fs = fs

    def token(self, path: str, data: bytes | None) -> str:
        return "" if data is None else hexdigest(data)

    def create(self, path: str, data: bytes) -> bool:
        with self._lock:
            if self._fs.exists(path):
                return False
            self._fs.pipe_file(path, data)
            return True

    def swap(self, path: str, expected: str, data: bytes) -> bool:
        with self._lock:
            if not self._fs.exists(path) or hexdigest(self._fs.cat_file(path)) != expected:
                return False
            self._fs.pipe_file(path, data)
            return True


class _S3:
    """Conditional PUTs. A client below may repeat one whose answer was lost, so that callers read back."""

    def __init__(self, fs: Any) -> None:
        self._fs = fs

    def token(self, path: str, data: bytes | None) -> str:
        return str(self._fs.info(path)["ETag"])

    def create(self, path: str, data: bytes) -> bool:
        try:
            self._fs.pipe_file(path, data, mode="create")
        except FileExistsError:
            return False
        except OSError as error:
            if _refused(error):
                return False
            raise
        return True

    def swap(self, path: str, expected: str, data: bytes) -> bool:
        try:
            self._fs.pipe_file(path, data, IfMatch=expected)
        except FileNotFoundError:
            return False
        except OSError as error:
            if _refused(error):
                return False
            raise
        return True


def _refused(error: OSError) -> bool:
    """Return whether S3 rejected the condition; 409, a concurrent write, leaves that open.

    S3's answer is in the error that s3fs translated; texts may contain any number, for instance in a request's id.
    """
    return _said(error, "412", "PreconditionFailed")


def _said(error: BaseException, status: str, code: str) -> bool:
    """Return whether S3 answered with this HTTP status, or this error code."""
    response = getattr(error.__cause__, "response", None)
    if not isinstance(response, Mapping):
        return False
    given = response.get("Error", {}).get("Code")
    return given in (status, code) or str(response.get("ResponseMetadata", {}).get("HTTPStatusCode")) == status

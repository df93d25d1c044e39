"""Where objects live: the few operations the format needs, and opening a place by its URL.

Names are relative, with `/` between parts, of letters, digits, `.`, `_` and `-`. Writes are atomic: an object is
there whole, or not. When a write raises StoreError it may still have happened; callers read back (format.md,
section 9).
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from checkpointing.errors import StoreError, StoreUnfit

Data = bytes | memoryview | Iterable[bytes | memoryview]

_NAME = re.compile(r"(?!.*(^|/)\.\.?(/|$))[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)*")
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")


@dataclass(frozen=True, slots=True, kw_only=True)
class Versioned:
    """An object's bytes, and a token that changes whenever they do."""

    data: bytes
    token: str


class Store(Protocol):
    """A flat namespace of objects. Safe to use from several threads."""

    @property
    def url(self) -> str:
        """The place, for messages."""
        ...

    def get(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Return bytes [start, stop) of an object; StoreNotFound if it is not there, fewer bytes if it is shorter."""
        ...

    def read(self, name: str) -> Versioned | None:
        """Return an object with its token, None if it is not there."""
        ...

    def size(self, name: str) -> int:
        """Return an object's bytes; StoreNotFound if it is not there."""
        ...

    def put(self, name: str, data: Data) -> None:
        """Write an object, durably, replacing what was there. Chunks are streamed, never joined."""
        ...

    def put_if_absent(self, name: str, data: bytes) -> bool:
        """Create an object, durably; False if one was there, which then is untouched."""
        ...

    def compare_and_swap(self, name: str, expected: str | None, data: bytes) -> bool:
        """Replace an object if its token is `expected` (None: if it is not there); False if it is not."""
        ...

    def list(self, prefix: str) -> Iterator[str]:
        """Yield the names that begin with `prefix`, sorted."""
        ...

    def delete(self, name: str) -> None:
        """Remove an object; nothing happens if it is not there."""
        ...


def chunks(data: Data) -> Iterator[memoryview]:
    """Yield the bytes of `data` piece by piece, without copying."""
    if isinstance(data, bytes | memoryview):
        data = (data,)
    for chunk in data:
        yield memoryview(chunk).cast("B")


def create(store: Store, name: str, data: bytes) -> bytes:
    """Create an object and return what is there now: `data`, or what somebody else had written before.

    A lost response is resolved by reading back; StoreError when the object is not there after all.
    """
    try:
        if store.put_if_absent(name, data):
            return data
    except StoreError:
        found = store.read(name)
        if found is None:
            raise
        return found.data
    return store.get(name)


def check_name(name: str) -> str:
    """Return `name` if it is one; ValueError otherwise."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is not the name of an object")
    return name


def open_store(url: str, *, write: bool = True, options: Mapping[str, Any] | None = None) -> Store:
    """Return the store at `url`: a path, `file://`, `s3://bucket/prefix` or `memory://`.

    With `write`, what the format needs is tried out on a probe object first, and a local directory is made if it is
    missing. `options` go to fsspec. StoreUnfit says what to change when the place cannot hold checkpoints.
    """
    # Each adapter is imported when it is asked for: fsspec costs time that a local store need not pay.
    from checkpointing.fsspec_store import FsspecStore
    from checkpointing.local_store import LocalStore

    if not url or url != url.strip() or "\0" in url:
        raise StoreUnfit(f"store {url!r}: give a directory, or a URL such as s3://bucket/prefix")
    scheme, separator, rest = url.partition("://")
    if not separator and _SCHEME.match(url):
        raise StoreUnfit(f"store {url!r}: a URL has '://' after its scheme, as in s3://bucket/prefix")
    store: Store
    if not separator or scheme == "file":
        path = Path(rest if separator else url).expanduser()
        if separator and not path.is_absolute():
            raise StoreUnfit(f"store {url!r}: file:// takes an absolute path, as in file:///data/checkpoints")
        store = LocalStore(path.absolute(), create=write)
    else:
        store = FsspecStore(url, options=options or {})
    if write:
        probe(store)
    return store


def probe(store: Store) -> None:
    """Try what the format needs on an object under `probe/`, and remove it; StoreUnfit says what did not work."""
    name = f"probe/{secrets.token_hex(8)}"
    first, second = secrets.token_bytes(32), secrets.token_bytes(32)
    try:
        created = store.put_if_absent(name, first)
        again = store.put_if_absent(name, second)
        found = store.read(name)
        if not created or again or found is None or found.data != first:
            raise StoreUnfit(
                f"store {store.url}: it does not honour create-only writes (If-None-Match), so two writers could "
                "overwrite each other. Use S3, another server that enforces them, or a local or shared directory."
            )
        stale = store.compare_and_swap(name, "0" * 32, second)
        if stale or not store.compare_and_swap(name, found.token, second) or store.get(name) != second:
            raise StoreUnfit(
                f"store {store.url}: it does not honour compare-and-swap (If-Match), so an old leader could not be "
                "fenced. Use S3, another server that enforces it, or a local or shared directory."
            )
    except StoreUnfit:
        raise
    except StoreError as error:
        raise StoreUnfit(f"store {store.url}: cannot be written: {error}. Check path and permissions.") from error
    finally:
        try:
            store.delete(name)
        except StoreError:
            pass  # what went wrong has been raised above; a left-over probe is ignored by readers

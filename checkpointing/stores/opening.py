"""From a URL to a store that has been tried out."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from checkpointing.errors import StoreError, StoreUnfit
from checkpointing.stores.local import LocalStore
from checkpointing.stores.protocol import Store

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")


def open_store(url: str, *, write: bool = True, options: Mapping[str, Any] | None = None) -> Store:
    """Return the store at `url`: a path, `file://`, `s3://bucket/prefix` or `memory://`.

    With `write`, what the format needs is tried out on a probe object first, and a local directory is made if it is
    missing. `options` go to fsspec. StoreUnfit says what to change when the place cannot hold checkpoints.
    """
    # Imported when it is asked for: fsspec costs time that a local store need not pay.
    from checkpointing.stores.fsspec import FsspecStore

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

"""From a URL to a store that has been tried out."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

from checkpointing.stores.address import parse
from checkpointing.stores.local import LocalStore
from checkpointing.stores.probing import probe
from checkpointing.stores.protocol import Store

_OBSTORE = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss")


def open_store(url: str, *, write: bool = True, options: Mapping[str, Any] | None = None) -> Store:
    """Return the store at `url`: a path, `file://`, `s3://bucket/prefix`, `gs://`, `az://`, `memory://`, or fsspec's.

    With `write`, what the format needs is tried out on a probe object first, and a local directory is made if it is
    missing. `options` are those of s3fs, gcsfs, adlfs or the protocol's own package. StoreUnfit says what to change
    when the place cannot hold checkpoints.
    """
    store = _backend(url, write=write, options=options or {})
    if write:
        probe(store)
    return store


def _backend(url: str, *, write: bool, options: Mapping[str, Any]) -> Store:
    address = parse(url)
    if address.path is not None:
        return LocalStore(address.path, create=write)
    # Imported when they are asked for: what they bring costs time that a local store need not pay.
    if address.scheme in _OBSTORE and importlib.util.find_spec("obstore") is not None:
        from checkpointing.stores.obstore import ObstoreStore

        return ObstoreStore(url, options=options)
    from checkpointing.stores.fsspec import FsspecStore

    return FsspecStore(url, options=options)

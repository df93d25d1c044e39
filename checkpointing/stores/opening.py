"""Opens a store by its URL, and tries it out.

It is built, from the inside out, of the place itself, a register if the place cannot decide, retries if it is reached
over a network, and encryption if a key is given. Each layer is a store itself; behind a register are retries as well.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from checkpointing.stores.address import parse
from checkpointing.stores.local import LocalStore
from checkpointing.stores.probing import probe
from checkpointing.stores.protocol import Store
from checkpointing.stores.register import Register, RegisteredStore
from checkpointing.stores.retrying import PATIENCE, RetryingStore, Trouble

if TYPE_CHECKING:
    from checkpointing.stores.keys import Key

_OBSTORE = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss")
_HERE = ("", "file", "memory")
IN_PLACE = ("ftp", "smb", "hdfs", "arrow_hdfs", "webhdfs")
"""Where a file is written under its own name: their renames do not replace, or fsspec does not say whether they do."""


def open_store(
    url: str,
    *,
    write: bool = True,
    options: Mapping[str, Any] | None = None,
    key: Key | None = None,
    register: Register | None = None,
    patience: float = PATIENCE,
    on_trouble: Callable[[Trouble], None] | None = None,
) -> Store:
    """Return the store at `url`: a path, `file://`, `s3://bucket/prefix`, `gs://`, `az://`, `memory://`, or fsspec's.

    With `write`, everything that the format needs is first tried out on a probe object, and a local directory is made
    if it is missing. `options` are those of s3fs, gcsfs, adlfs or the protocol's own package. With a `key`, everything
    is encrypted. A `register` decides for places without conditional writes; every writer needs the same one.
    `patience`: seconds for which an operation is retried if the store is reached over a network and is busy or does not
    answer; `on_trouble` is called when that takes long. StoreUnfit says what to change if the place cannot hold
    checkpoints.
    """
    if not 0.0 <= patience < float("inf"):
        raise ValueError(f"a patience is a number of seconds from 0, not {patience!r}")
    address = parse(url)

    def patient(store: Store) -> Store:
        return store if address.scheme in _HERE else RetryingStore(store, patience, on_trouble=on_trouble)

    store = _backend(url, write=write, options=options or {}, patience=patience)
    if register is not None:
        # Patient with the place by itself, too: once a swap is decided, only the put of its copy is repeated.
        store = RegisteredStore(patient(store), register)
    store = patient(store)
    if key is not None:
        store = _encrypted(store, key)
    if write:
        probe(store)
    return store


def _backend(url: str, *, write: bool, options: Mapping[str, Any], patience: float) -> Store:
    address = parse(url)
    if address.path is not None:
        return LocalStore(address.path, create=write)
    # Imported only when needed: their imports cost time that a local store need not pay.
    if address.scheme in _OBSTORE and importlib.util.find_spec("obstore") is not None:
        from checkpointing.stores.obstore import ObstoreStore, usable

        if usable():
            return ObstoreStore(url, options=options, patience=patience)
    from checkpointing.stores.fsspec import FsspecStore

    return FsspecStore(url, options=options)


def _encrypted(store: Store, key: Key) -> Store:
    from checkpointing.stores.encrypted import EncryptedStore

    return EncryptedStore(store, key)

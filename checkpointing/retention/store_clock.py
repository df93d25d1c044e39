"""The store's own clock, the only one that collections use."""

from __future__ import annotations

import contextlib
import secrets

from checkpointing.errors import StoreError
from checkpointing.format import names
from checkpointing.stores.protocol import Store

_LISTINGS = 5


def store_time(store: Store) -> float:
    """Return the time by the store's clock, in seconds: the time of an object that was written just now."""
    name = f"{names.PROBE}{secrets.token_hex(16)}"
    store.put(name, b"what time is it")
    try:
        for _ in range(_LISTINGS):
            modified = modified_at(store, name)
            if modified is not None:
                return modified
    finally:
        with contextlib.suppress(StoreError):
            store.delete(name)
    raise StoreError(f"store {store.url}: its listing does not show {name}, which was just written; try again")


def modified_at(store: Store, name: str) -> float | None:
    """Return when an object was written, by the store's clock; None if no listing shows it."""
    return next((entry.modified for entry in store.entries(name) if entry.name == name), None)

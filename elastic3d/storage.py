"""Opens the store of a run, for its keepers and for its trainers."""

from __future__ import annotations

from collections.abc import Callable

from checkpointing import Store, open_store, read_latest
from checkpointing.errors import CheckpointError, StoreUnfit
from checkpointing.reading.registered import check_register
from checkpointing.stores.address import redacted
from checkpointing.stores.keys import Key
from checkpointing.stores.register import Register
from checkpointing.stores.retrying import Trouble
from elastic3d.errors import ConfigurationError
from elastic3d.values import StoreAt


def open_to_read(at: StoreAt) -> Store:
    """Return the store as a trainer needs it; CheckpointError.

    If refs are decided in a register, it reads the copies published in the store: they are at most some moments old,
    and whatever they name is complete.
    """
    return open_store(at.url, write=False, key=_key(at), patience=at.patience)


def open_checked(
    at: StoreAt, register: Register | None, report: Callable[[Trouble], None] | None = None
) -> tuple[Store, int]:
    """Return the store and the newest generation it knows; ConfigurationError, without secrets, if it cannot be used.

    The callback is called, on any thread, when an operation has to wait for the store.
    """
    try:
        store = open_store(at.url, key=_key(at), register=register, patience=at.patience, on_trouble=report)
        latest = read_latest(store)
        check_register(store)
    except StoreUnfit as error:
        hint = (
            ""
            if at.register
            else ". If a store has no conditional writes, elastic3d.Checkpointing(register='etcd') lets etcd decide"
        )
        raise ConfigurationError(f"store={redacted(at.url)!r} cannot be used: {error}{hint}") from error
    except (CheckpointError, OSError) as error:
        raise ConfigurationError(f"store={redacted(at.url)!r} cannot be used: {error}") from error
    return store, latest.generation if latest is not None else 0


def _key(at: StoreAt) -> Key | None:
    return Key.from_file(at.key) if at.key else None

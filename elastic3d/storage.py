"""How the store of a run is opened, by its keepers and by its trainers."""

from __future__ import annotations

from checkpointing import Store, open_store, read_latest
from checkpointing.errors import CheckpointError
from elastic3d.errors import ConfigurationError
from elastic3d.values import StoreAt


def open_checked(at: StoreAt) -> tuple[Store, int]:
    """Return the store and the newest generation it knows; ConfigurationError where it cannot be used."""
    try:
        store = open_store(at.url)
        latest = read_latest(store)
    except (CheckpointError, OSError) as error:
        raise ConfigurationError(f"store={at.url!r} cannot be used: {error}") from error
    return store, latest.generation if latest is not None else 0

"""Whether a register decides what a store holds, as its newest checkpoint shows (format.md, section 9)."""

from __future__ import annotations

from checkpointing.errors import FormatError, NoCheckpoint, StoreUnfit
from checkpointing.format import names
from checkpointing.reading.naming import read_ref
from checkpointing.reading.reader import read_record
from checkpointing.stores.protocol import Store, decides_creations


def register_decides(store: Store) -> bool:
    """Return whether a register has decided the newest checkpoint of a store.

    Its manifests then have names that do not come twice. Where it cannot be read, all there are count.
    """
    try:
        ref = read_ref(store)
        if ref is None or ref.checkpoint is None:
            return False
        manifests = [entry.name for entry in read_record(store, ref.checkpoint).manifests]
    except (FormatError, NoCheckpoint):
        manifests = list(store.list(names.SAVES))
    return any(map(names.manifest_write_id, manifests))


def check_register(store: Store) -> None:
    """Raise StoreUnfit if a register decides what a store holds, and the store was opened without one."""
    if decides_creations(store) and register_decides(store):
        raise StoreUnfit(
            f"store {store.url}: a register decides here, and does not see what is written beside it. Give that "
            "register, or write to a new place, into which `elastic3d ckpt export` and `import` bring a checkpoint"
        )

"""The objects that sweeps are about to delete, according to refs (format.md, section 13)."""

from __future__ import annotations

from checkpointing.errors import Corrupt, StoreNotFound
from checkpointing.format.encoding import hexdigest
from checkpointing.format.refs import Older, Ref
from checkpointing.format.tombstone import Tombstone, decode_tombstone
from checkpointing.reading.naming import read_versioned
from checkpointing.stores.protocol import Store


def condemned(store: Store, ref: Ref) -> frozenset[str]:
    """Return the names of all objects that sweeps may still be deleting; Corrupt if a tombstone is damaged.

    A sweep that has ended cleanly since `ref` was read deletes nothing more and is left out.
    """
    tombstones = [read_tombstone(store, link) for link in ref.condemning]
    return frozenset(doomed.name for tombstone in tombstones if tombstone for doomed in tombstone.objects)


def read_tombstone(store: Store, link: Older) -> Tombstone | None:
    """Return the tombstone that a ref linked to, None if the ref no longer does so and it is gone."""
    try:
        data = store.get(link.name)
    except StoreNotFound:
        ref, _ = read_versioned(store)
        if ref is None or link not in ref.condemning:
            return None
        raise Corrupt(f"store {store.url}: {link.name}: is missing; `elastic3d ckpt repair` goes on without") from None
    if hexdigest(data) != link.digest:
        raise Corrupt(f"store {store.url}: {link.name}: is damaged; `elastic3d ckpt repair` goes on without it")
    return decode_tombstone(data, link.name)

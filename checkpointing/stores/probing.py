"""Tries out, once and on an object of its own, whether a place does what the format needs.

Some stores take the headers of a conditional write and ignore them; some list late; a proxy may drop ranges. Otherwise
that would only show in a lost checkpoint.
"""

from __future__ import annotations

import secrets

from checkpointing.errors import StoreError, StoreNotFound, StoreUnfit
from checkpointing.stores.protocol import Store

_ELSEWHERE = "Use S3, another server that does, or a local or shared directory"


def probe(store: Store) -> None:
    """Write, create, swap, read, list and delete an object under `probe/`; StoreUnfit says what did not work."""
    name = f"probe/{secrets.token_hex(8)}"
    first, second, third = secrets.token_bytes(32), secrets.token_bytes(32), secrets.token_bytes(32)

    def demand(done: bool, promise: str, danger: str, remedy: str = f"{_ELSEWHERE}.") -> None:
        if not done:
            raise StoreUnfit(f"store {store.url}: it does not honour {promise}, so {danger}. {remedy}")

    try:
        created = store.put_if_absent(name, first)
        again = store.put_if_absent(name, second)
        versioned = store.read(name)
        demand(
            created and not again and versioned is not None and versioned.data == first,
            "create-only writes (If-None-Match)",
            "two writers could overwrite each other",
            f"{_ELSEWHERE}, or give a register that decides in its place.",
        )
        assert versioned is not None
        swapped = store.compare_and_swap(name, versioned.token, second)
        stale = store.compare_and_swap(name, versioned.token, third)
        demand(
            swapped and not stale and store.get(name) == second,
            "compare-and-swap (If-Match)",
            "an old leader could not be fenced",
            f"{_ELSEWHERE}, or give a register that decides in its place.",
        )
        demand(store.get(name, 8, 16) == second[8:16], "reads of ranges", "every tile would cost a whole pack")
        demand(
            [(entry.name, entry.size) for entry in store.entries(name)] == [(name, len(second))],
            "listings that show what was written",
            "garbage collection could remove what is in use",
        )
        store.delete(name)
        demand(_gone(store, name), "deletions", "nothing could ever be collected")
    except StoreUnfit:
        raise
    except StoreError as error:
        raise StoreUnfit(f"store {store.url}: cannot be written: {error}. Check path and permissions.") from error
    finally:
        try:
            store.delete(name)
        except StoreError:
            pass  # real errors have been raised above; readers ignore a left-over probe


def _gone(store: Store, name: str) -> bool:
    try:
        store.size(name)
    except StoreNotFound:
        return True
    return False

"""Moves `latest`: every change of what is kept, and by which generation, is one swap of it (format.md, section 9)."""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
from collections.abc import Callable

from checkpointing.errors import StoreError
from checkpointing.format import names
from checkpointing.format.encoding import hexdigest
from checkpointing.format.history import History, encode_history
from checkpointing.format.refs import SPILLED, Older, Ref, Verdict, encode_ref
from checkpointing.reading.naming import read_versioned
from checkpointing.stores.protocol import Store, create

_SWAPS = 32  # each one lost means that another one succeeded
_LOST = 3


def move(
    store: Store,
    decide: Callable[[Ref | None], Verdict],
    build: Callable[[Ref | None, str], Ref],
    *,
    shadow: bool = False,
) -> tuple[Verdict, Ref | None]:
    """Swap `latest` as decided, and return the verdict with the resulting ref.

    `decide` and `build` (given the ref and a write-id) are called again for every ref that is found; the last result
    counts. With `shadow` a copy is left for `repair_latest`. StoreError: call again.
    """
    write_id = secrets.token_hex(16)
    lost: list[StoreError] = []
    for _ in range(_SWAPS):
        ref, token = read_versioned(store)
        if ref is not None and ref.write_id == write_id:
            return Verdict.MOVE, ref  # the swap whose response was lost
        verdict = decide(ref)
        if verdict is not Verdict.MOVE:
            return verdict, ref
        moved = dataclasses.replace(build(ref, write_id), changes=ref.changes + 1 if ref is not None else 1)
        data = encode_ref(moved)
        try:
            if store.compare_and_swap(names.LATEST, token, data):
                if shadow:
                    leave_shadow(store, data)
                return verdict, moved
        except StoreError as error:
            lost.append(error)
            if len(lost) == _LOST:
                raise
    raise StoreError(f"store {store.url}: {_SWAPS} swaps of {names.LATEST} lost against others; try again")


def leave_shadow(store: Store, data: bytes) -> None:
    """Leave a copy of the ref. It may be missing or old: repair takes from it only what is found nowhere else."""
    with contextlib.suppress(StoreError):
        store.put(names.SHADOW, data)


def write_history(store: Store, checkpoints: tuple[str, ...], older: Older | None) -> Older:
    """Write a part of the history under a name of its own, and return the link to it."""
    data = encode_history(History(checkpoints=checkpoints, older=older))
    name = names.history(secrets.token_hex(16))
    create(store, name, data)
    return Older(name=name, digest=hexdigest(data))


def relist(store: Store, kept: tuple[str, ...]) -> tuple[tuple[str, ...], Older | None]:
    """Return `earlier` and `older` for a list of checkpoints, newest first; all but the newest go to the history."""
    older: Older | None = None
    rest = kept[SPILLED:]
    for start in reversed(range(0, len(rest), SPILLED)):
        older = write_history(store, rest[start : start + SPILLED], older)
    return kept[:SPILLED], older

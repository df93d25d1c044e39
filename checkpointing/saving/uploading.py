"""Uploads one pack, so that afterwards the store holds exactly these bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import tenacity

from checkpointing.errors import Miswritten, StoreNotFound
from checkpointing.format import names
from checkpointing.format.pack import HEAD, PackPlan, PackTile, whole
from checkpointing.stores.protocol import Store

_RUN = 8 << 20  # bytes read at once when a pack of an earlier try is checked
_TRIES = 3


def is_there(store: Store, plan: PackPlan) -> bool:
    """Return whether an earlier try has left this pack intact: every byte is read."""
    try:
        return store.size(names.pack(plan.id)) == plan.size and _as_planned(store, plan)
    except StoreNotFound:
        return False


def upload(store: Store, plan: PackPlan, *, check: bool) -> None:
    """Write a pack, durably; with `check`, Miswritten if the store still holds something else after retries."""
    for attempt in tenacity.Retrying(
        retry=tenacity.retry_if_exception_type(Miswritten), stop=tenacity.stop_after_attempt(_TRIES), reraise=True
    ):
        with attempt:
            store.put(names.pack(plan.id), plan.chunks, check=check)


def _as_planned(store: Store, plan: PackPlan) -> bool:
    name = names.pack(plan.id)
    end = plan.tiles[-1].offset + plan.tiles[-1].length
    if store.get(name, 0, len(HEAD)) != HEAD or store.get(name, end) != b"".join(plan.chunks[-2:]):
        return False
    for run in _runs(plan.tiles):
        start = run[0].offset
        data = memoryview(store.get(name, start, run[-1].offset + run[-1].length))
        for tile in run:
            if not whole(tile, data[tile.offset - start : tile.offset - start + tile.length]):
                return False
    return True


def _runs(tiles: Sequence[PackTile]) -> Iterator[list[PackTile]]:
    run: list[PackTile] = []
    for tile in tiles:
        if run and tile.offset + tile.length - run[0].offset > _RUN:
            yield run
            run = []
        run.append(tile)
    if run:
        yield run

"""Uploads one pack, so that afterwards the store holds exactly these bytes.

A pack's tiles lie in memory that others may write to, and in which bits change: that a tile had its digest a moment ago
does not say that what is sent has it. So what is hashed is a copy of each piece, and what is sent is that copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import blake3
import tenacity

from checkpointing.errors import Corrupt, Miswritten, StoreNotFound, Tampered
from checkpointing.format import names
from checkpointing.format.pack import HEAD, PackPlan, PackTile, whole
from checkpointing.format.tiles import begin_digest
from checkpointing.saving.encoding import changed
from checkpointing.stores.protocol import Store

_RUN = 8 << 20  # bytes read at once when a pack of an earlier try is checked
_PIECE = 256 << 10  # bytes copied, hashed and sent at a time: they stay in the cache meanwhile
_TRIES = 3


class Outgoing:
    """A pack's bytes as they are sent; Corrupt, before its end, for a tile of which other bytes were sent.

    Iterating it again reads the tiles again. Each piece is memory of its own, that nobody else writes to.
    """

    def __init__(self, plan: PackPlan) -> None:
        self._plan = plan
        self.error: Corrupt | None = None
        """What iterating it last has raised: a store may tell of it in words of its own."""

    def __iter__(self) -> Iterator[bytes]:
        """Yield the pieces."""
        self.error = None
        head, *tiles, index, tail = self._plan.chunks
        yield bytes(head)
        for tile, stored in zip(self._plan.tiles, tiles, strict=True):
            hasher = blake3.blake3() if tile.check else begin_digest(tile.spec, tile.box)
            data = memoryview(stored).cast("B")
            for start in range(0, data.nbytes, _PIECE):
                piece = bytes(data[start : start + _PIECE])
                hasher.update(piece)
                yield piece
            if hasher.hexdigest() != (tile.check or tile.digest):
                self.error = changed(tile.spec, tile.box)
                raise self.error
        yield bytes(index)
        yield bytes(tail)


def is_there(store: Store, plan: PackPlan) -> bool:
    """Return whether an earlier try has left this pack intact: every byte is read."""
    try:
        return store.size(names.pack(plan.id)) == plan.size and _as_planned(store, plan)
    except (StoreNotFound, Tampered):
        return False


def upload(store: Store, plan: PackPlan, *, check: bool) -> None:
    """Write a pack, durably; with `check`, Miswritten if the store still holds something else after retries.

    Corrupt, and there is no such pack, if a tile's bytes do not have its digest any more.
    """
    outgoing = Outgoing(plan)
    for attempt in tenacity.Retrying(
        retry=tenacity.retry_if_exception_type(Miswritten), stop=tenacity.stop_after_attempt(_TRIES), reraise=True
    ):
        with attempt:
            try:
                store.put(names.pack(plan.id), outgoing, check=check)
            except Exception:
                if outgoing.error is not None:
                    raise outgoing.error from None
                raise


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

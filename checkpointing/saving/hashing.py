"""Digests and statistics of many tiles, computed by a few threads, in order and not far ahead of the consumer."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from checkpointing.format.stats import Stats, statistics
from checkpointing.format.tiles import Piece, digest
from checkpointing.saving.bases import Bases
from checkpointing.saving.encoding import Hashed, changed

_BATCH = 4 << 20  # small tiles go together: passing one to a thread costs more than hashing it


def hashed(tiles: Sequence[Piece], bases: Bases, workers: int) -> Generator[Hashed]:
    """Yield every tile with its digest and statistics, in the given order; Corrupt for one that lost its digest.

    The statistics of a tile that is already known are None: its existing ones are kept. One that comes with its digest
    is then not read at all.
    """

    def work(batch: Sequence[Piece]) -> list[Hashed]:
        return [_hash(tile, bases) for tile in batch]

    pool = ThreadPoolExecutor(workers, thread_name_prefix="digests")
    waiting: deque[Future[list[Hashed]]] = deque()
    try:
        for batch in _batches(tiles):
            waiting.append(pool.submit(work, batch))
            if len(waiting) > 2 * workers:
                yield from waiting.popleft().result()
        while waiting:
            yield from waiting.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _hash(tile: Piece, bases: Bases) -> Hashed:
    stats: Stats = None
    if tile.digest and bases.same(tile.spec, tile.box, tile.digest) is not None:
        return Hashed(piece=tile, digest=tile.digest, stats=stats)
    tile_digest = digest(tile.spec, tile.box, tile.data)
    if tile.digest not in ("", tile_digest):
        raise changed(tile.spec, tile.box)
    if bases.same(tile.spec, tile.box, tile_digest) is None:
        stats = statistics(tile.spec.dtype, tile.data)  # right after the digest, while the tile is in the cache
    return Hashed(piece=tile, digest=tile_digest, stats=stats)


def _batches(tiles: Sequence[Piece]) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    filled = 0
    for tile in tiles:
        batch.append(tile)
        filled += tile.data.nbytes
        if filled >= _BATCH or len(batch) == 256:
            yield batch
            batch, filled = [], 0
    if batch:
        yield batch

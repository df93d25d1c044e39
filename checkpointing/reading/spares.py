"""Equal tiles in other checkpoints, for when a checkpoint's own copy of a tile is damaged."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator

from checkpointing.errors import FormatError, RestoreError, SourceError, StoreError, TileLost
from checkpointing.format.codecs import Bytes
from checkpointing.format.manifest import StoredTile
from checkpointing.format.tiles import digest
from checkpointing.reading.packs import PackSource, offer
from checkpointing.reading.reader import Checkpoint, open_checkpoint, read_latest
from checkpointing.reading.sources import Offered

_OPENED = 8  # of the other checkpoints, the newest


class Spares:
    """A last source for a checkpoint's tiles: any other place in the store's newest checkpoints with equal contents.

    Equal digests mean equal contents, whatever tensor they belong to. Nothing is read before a tile is requested.
    """

    def __init__(self, checkpoint: Checkpoint, name: str = "spares") -> None:
        self.name = name
        self._checkpoint = checkpoint
        self._packs = PackSource(checkpoint.store, name)
        self._lock = threading.Lock()
        self._unopened: list[str] | None = None
        self._by_digest: dict[str, list[StoredTile]] = defaultdict(list)
        self._add(checkpoint)

    def offers(self) -> Iterator[Offered]:
        """Yield every tile of the checkpoint as an offer; to be given to the resolver as the last source."""
        for tile in self._checkpoint.tiles:
            yield Offered(
                spec=tile.spec,
                box=tile.box,
                digest=tile.digest,
                source=self.name,
                where={"pack": tile.pack, "offset": tile.offset},
            )

    def fetch(self, tile: Offered) -> Bytes:
        """Return the tile from another place than its own, verified; TileLost if there is none."""
        own = tile.where["pack"], tile.where["offset"]
        for there in self._places(tile.digest):
            if (there.pack, there.offset) == own:
                continue
            try:
                data = self._packs.fetch(offer(there, self.name))
            except SourceError:
                continue
            if digest(there.spec, there.box, memoryview(data)) == tile.digest:
                return data
        raise TileLost(f"no other checkpoint in {self._checkpoint.store.url} has an equal tile")

    def _places(self, wanted: str) -> Iterator[StoredTile]:
        seen = 0
        while True:
            with self._lock:
                places = self._by_digest[wanted][seen:]
            yield from places
            seen += len(places)
            with self._lock:
                if len(self._by_digest[wanted]) == seen and not self._open_next():
                    return

    def _open_next(self) -> bool:
        """Open one more checkpoint; False if there is none left."""
        store = self._checkpoint.store
        try:
            if self._unopened is None:
                ref = read_latest(store)
                others = [name for name in (ref.committed if ref else ()) if name != self._checkpoint.name]
                self._unopened = others[:_OPENED]
            if not self._unopened:
                return False
            self._add(open_checkpoint(store, self._unopened.pop(0)))
        except (StoreError, FormatError, RestoreError):
            self._unopened = self._unopened or []  # a damaged checkpoint has nothing to offer
        return True

    def _add(self, checkpoint: Checkpoint) -> None:
        for tile in (*checkpoint.tiles, *checkpoint.copies):
            self._by_digest[tile.digest].append(tile)

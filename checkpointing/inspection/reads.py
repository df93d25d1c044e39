"""The reads that restoring some regions would need: a pure function of manifests."""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import dataclass

from checkpointing.errors import MissingTile
from checkpointing.format.manifest import StoredTile
from checkpointing.format.tiles import Box, TensorSpec, subtract
from checkpointing.inspection.difference import by_key
from checkpointing.inspection.documents import extents
from checkpointing.reading.packs import runs


@dataclass(frozen=True, slots=True, kw_only=True)
class Reads:
    """The bytes that one reader needs, and those it reads to get them.

    needed: bytes of the regions. stored: stored bytes of the tiles that hold them. read: bytes of all requests,
    including gaps between tiles.
    """

    needed: int
    tiles: int
    stored: int
    read: int
    requests: int
    packs: int

    @property
    def over_read(self) -> float | None:
        """Bytes read per byte needed, None if none is needed."""
        return self.read / self.needed if self.needed else None


class TileIndex:
    """An index of a checkpoint's tiles by region."""

    def __init__(self, tiles: Iterable[StoredTile]) -> None:
        self._tiles: dict[str, tuple[list[StoredTile], list[int], int]] = {}
        for key, own in by_key(tiles).items():
            ordered = sorted(own, key=lambda tile: _start(tile.box))
            starts = [_start(tile.box) for tile in ordered]
            longest = max((_stop(tile.box) - _start(tile.box) for tile in ordered), default=0)
            self._tiles[key] = ordered, starts, longest

    def of(self, spec: TensorSpec, box: Box) -> list[StoredTile]:
        """Return the tiles that are read for a region; MissingTile if they do not hold all of it."""
        if not box.numel:
            return []
        tiles, starts, longest = self._tiles.get(spec.key, ([], [], 0))
        chosen, todo = [], [box]
        for place in range(bisect.bisect_left(starts, _start(box) - longest), len(tiles)):
            tile = tiles[place]
            if not todo or starts[place] >= _stop(box):
                break
            if any(part.intersect(tile.box) for part in todo):
                chosen.append(tile)
                todo = [rest for part in todo for rest in subtract(part, tile.box)]
        if todo:
            raise MissingTile(f"{spec.key} {todo[0]}: the checkpoint has no such region")
        return chosen

    def reads(self, wanted: Iterable[tuple[TensorSpec, Box]]) -> Reads:
        """Return the reads for the wanted regions; a tile that several of them need is read once."""
        needed = 0
        chosen: dict[tuple[str, Box], StoredTile] = {}
        for spec, box in wanted:
            needed += box.numel * spec.itemsize
            for tile in self.of(spec, box):
                chosen[spec.key, tile.box] = tile
        places = sorted({(e.pack, e.offset, e.length) for tile in chosen.values() for e in extents(tile)})
        requests = list(runs(places))
        return Reads(
            needed=needed,
            tiles=len(chosen),
            stored=sum(length for _, _, length in places),
            read=sum(run[-1][1] + run[-1][2] - run[0][1] for run in requests),
            requests=len(requests),
            packs=len({pack for pack, _, _ in places}),
        )


def _start(box: Box) -> int:
    return box.start[0] if box.start else 0


def _stop(box: Box) -> int:
    return box.stop[0] if box.stop else 1

"""What restoring some regions would read from the store: a pure function of manifests."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from checkpointing.errors import MissingTile
from checkpointing.format.manifest import StoredTile
from checkpointing.format.tiles import Box, TensorSpec, subtract
from checkpointing.looking.difference import by_key
from checkpointing.looking.found import Extent, extents

GAP = 64 << 10
"""Unwanted bytes between two wanted ranges that are read with them rather than asked around."""
SLACK = 20
"""All gaps together are at most one part in so many of what is wanted."""
RUN = 16 << 20
"""The most bytes that one request joins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reads:
    """What one reader needs and what it takes to get it.

    needed: bytes of the regions. stored: bytes of the tiles that hold them, as they are stored. read: bytes of all
    requests, gaps between tiles included.
    """

    needed: int
    tiles: int
    stored: int
    read: int
    requests: int
    packs: int

    @property
    def over_read(self) -> float | None:
        """Bytes read for each that is needed, None where none is."""
        return self.read / self.needed if self.needed else None


class Catalogue:
    """The tiles of a checkpoint, found by region."""

    def __init__(self, tiles: Iterable[StoredTile]) -> None:
        self._tiles: dict[str, tuple[list[StoredTile], list[int], int]] = {}
        for key, own in by_key(tiles).items():
            ordered = sorted(own, key=lambda tile: _start(tile.box))
            starts = [_start(tile.box) for tile in ordered]
            longest = max((_stop(tile.box) - _start(tile.box) for tile in ordered), default=0)
            self._tiles[key] = ordered, starts, longest

    def of(self, spec: TensorSpec, box: Box) -> list[StoredTile]:
        """Return the tiles that are read for a region; MissingTile when they do not hold all of it."""
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
        """Return what restoring the wanted regions would read; a tile that several of them need is read once."""
        needed = 0
        chosen: dict[tuple[str, Box], StoredTile] = {}
        for spec, box in wanted:
            needed += box.numel * spec.itemsize
            for tile in self.of(spec, box):
                chosen[spec.key, tile.box] = tile
        ranges = sorted({extent for tile in chosen.values() for extent in extents(tile)}, key=_place)
        read, requests = _requests(ranges)
        return Reads(
            needed=needed,
            tiles=len(chosen),
            stored=sum(extent.length for extent in ranges),
            read=read,
            requests=requests,
            packs=len({extent.pack for extent in ranges}),
        )


def _requests(ranges: Sequence[Extent]) -> tuple[int, int]:
    """Return the bytes and the number of requests, neighbours being read together."""
    slack = sum(extent.length for extent in ranges) // SLACK
    gaps = {}
    for number, (extent, after) in enumerate(itertools.pairwise(ranges), start=1):
        gap = after.offset - extent.offset - extent.length
        if after.pack == extent.pack and 0 <= gap <= GAP:
            gaps[number] = gap
    joined = set()
    for number in sorted(gaps, key=gaps.__getitem__):
        slack -= gaps[number]
        if slack < 0:
            break
        joined.add(number)
    read = requests = first = 0
    for number, extent in enumerate(ranges):
        stop = extent.offset + extent.length
        if number not in joined or stop - first > RUN:
            requests, first = requests + 1, extent.offset
            read += extent.length
        else:
            read += extent.length + gaps[number]
    return read, requests


def _place(extent: Extent) -> tuple[str, int]:
    return extent.pack, extent.offset


def _start(box: Box) -> int:
    return box.start[0] if box.start else 0


def _stop(box: Box) -> int:
    return box.stop[0] if box.stop else 1

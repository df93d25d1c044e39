"""Tiles out of packs: ranges of objects, decoded, bases included (format.md, sections 5 and 6)."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

from checkpointing.errors import Corrupt, SourceError, StoreError, StoreNotFound, TileLost
from checkpointing.format import names
from checkpointing.format.codecs import Bytes, Codec, decode
from checkpointing.format.encoding import hexdigest
from checkpointing.format.manifest import Base, StoredTile
from checkpointing.format.tiles import Box, TensorSpec, digest
from checkpointing.reading.sources import Offered
from checkpointing.stores.protocol import Store

_RUN = 16 << 20  # bytes read in one request for neighbouring tiles
_GAP = 64 << 10  # unwanted bytes that are cheaper to read than to ask again ...
_SLACK = 20  # ... as long as all of them together are at most one part in so many of the wanted ones

Place = tuple[str, int, int]
"""Stored bytes: pack, offset, length."""


def offer(tile: StoredTile, source: str) -> Offered:
    """Return a stored tile as the resolver takes it; `where` says all that a `PackSource` needs."""
    where: dict[str, Any] = {"pack": tile.pack, "offset": tile.offset, "length": tile.length}
    if tile.codec is not Codec.RAW:
        where |= {"codec": str(tile.codec), "check": tile.check}
    if tile.base is not None:
        base = tile.base
        where["base"] = {"digest": base.digest, "pack": base.pack, "offset": base.offset, "length": base.length}
        where["base"] |= {"codec": str(base.codec), "check": base.check}
    return Offered(spec=tile.spec, box=tile.box, digest=tile.digest, source=source, where=where)


class PackSource:
    """Tiles out of packs, by ranges; neighbours that are asked for together come in one request.

    What an encoded tile is stored as, and the base of a difference, are checked before they are used; the tile itself
    is checked by whoever fetches it.
    """

    def __init__(self, store: Store, name: str = "store") -> None:
        self.name = name
        self._store = store
        self._ahead: dict[Place, list[memoryview]] = {}
        self._lock = threading.Lock()

    def fetch(self, tile: Offered) -> Bytes:
        """Return a tile's bytes; TileLost when they are not there or damaged, SourceError when the store fails."""
        own, base = _places(tile)
        stored = self._stored(own)
        if own.codec is Codec.RAW:
            return stored
        return _decoded(tile.spec, tile.box, own, stored, None if base is None else self._base(tile, base))

    def prefetch(self, tiles: Sequence[Offered]) -> None:
        """Read neighbouring tiles together and keep them until they are fetched."""
        wanted: dict[Place, int] = {}
        for tile in tiles:
            for stored in _places(tile):
                if stored is not None:
                    key = (stored.pack, stored.offset, stored.length)
                    wanted[key] = wanted.get(key, 0) + 1
        for run in runs(sorted(wanted)):
            if len(run) == 1 and wanted[run[0]] == 1:
                continue
            pack, start = run[0][0], run[0][1]
            data = memoryview(self._get(pack, start, run[-1][1] + run[-1][2]))
            with self._lock:
                for place in run:
                    part = data[place[1] - start : place[1] - start + place[2]]
                    self._ahead.setdefault(place, []).extend([part] * wanted[place])

    def _base(self, tile: Offered, base: Base) -> Bytes:
        stored = self._stored(base)
        data = stored if base.codec is Codec.RAW else _decoded(tile.spec, tile.box, base, stored, None)
        if digest(tile.spec, tile.box, data) != base.digest:
            raise TileLost(f"{_at(base)}: the base it is a difference to does not have its digest")
        return data

    def _stored(self, place: Base) -> Bytes:
        key = (place.pack, place.offset, place.length)
        with self._lock:
            ahead = self._ahead.get(key)
            data = ahead.pop() if ahead else None
            if ahead is not None and not ahead:
                del self._ahead[key]
        return self._get(place.pack, place.offset, place.offset + place.length) if data is None else data

    def _get(self, pack: str, start: int, stop: int) -> bytes:
        try:
            return self._store.get(names.pack(pack), start, stop)
        except StoreNotFound as error:
            raise TileLost(str(error)) from error
        except StoreError as error:
            raise SourceError(str(error)) from error


def _places(tile: Offered) -> tuple[Base, Base | None]:
    """Return where a tile's stored bytes lie, and those of its base."""
    where = tile.where
    base = where.get("base")
    own = _place(where, tile.digest)
    return own, None if base is None else _place(base, base["digest"])


def _place(where: dict[str, Any], tile_digest: str) -> Base:
    return Base(
        digest=tile_digest,
        pack=where["pack"],
        offset=where["offset"],
        length=where["length"],
        codec=Codec(where.get("codec", Codec.RAW)),
        check=where.get("check", ""),
    )


def _at(place: Base) -> str:
    return f"{names.pack(place.pack)} at {place.offset}"


def _decoded(spec: TensorSpec, box: Box, place: Base, stored: Bytes, base: Bytes | None) -> Bytes:
    if memoryview(stored).nbytes != place.length or hexdigest(memoryview(stored)) != place.check:
        raise TileLost(f"{_at(place)}: the stored bytes do not have their digest")
    try:
        return decode(place.codec, stored, box.numel * spec.itemsize, spec.itemsize, base)
    except Corrupt as error:
        raise TileLost(f"{_at(place)}: {error}") from error


def runs(places: Sequence[Place]) -> Iterator[list[Place]]:
    """Yield sorted places in groups that are worth one request each.

    Gaps are read along where that saves a request, the smallest first, and never more than a 20th of what is wanted.
    """
    slack = sum(length for _, _, length in places) // _SLACK
    gaps = {}
    for number in range(1, len(places)):
        (pack, offset, length), after = places[number - 1], places[number]
        if after[0] == pack and 0 <= (gap := after[1] - offset - length) <= _GAP:
            gaps[number] = gap
    joined = set()
    for number in sorted(gaps, key=gaps.__getitem__):
        slack -= gaps[number]
        if slack < 0:
            break
        joined.add(number)
    run: list[Place] = []
    for number, place in enumerate(places):
        if run and (number not in joined or place[1] + place[2] - run[0][1] > _RUN):
            yield run
            run = []
        run.append(place)
    if run:
        yield run

"""Reads tiles out of packs: ranges of objects, decoded, with their bases (format.md, sections 5 and 6)."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

from checkpointing.errors import Corrupt, SourceError, StoreError, StoreNotFound, Tampered, TileLost
from checkpointing.format import names
from checkpointing.format.codecs import Bytes, Codec, decode
from checkpointing.format.encoding import hexdigest
from checkpointing.format.manifest import Base, StoredTile
from checkpointing.format.tiles import Box, TensorSpec, digest
from checkpointing.reading.sources import LITTLE, Offered
from checkpointing.stores.protocol import Store

_RUN = 16 << 20  # bytes read in one request for neighbouring tiles
_SCATTERED = 4 << 20  # the same if a request costs next to nothing: bytes are then hashed while in the cache
_FAR = 8 << 20  # bytes that are worth a request to anything other than a disk
_GAP = 64 << 10  # unwanted bytes that are cheaper to read than another request ...
_SLACK = 20  # ... as long as the wanted bytes are at least so many times all of them

Place = tuple[str, int, int]
"""Stored bytes: pack, offset, length."""


@runtime_checkable
class Scattering(Protocol):
    """A store that reads into its caller's memory."""

    def read_into(self, name: str, start: int, buffers: Sequence[memoryview]) -> int:
        """Fill buffers one after another with bytes from `start` on; return how many there were."""
        ...


def offer(tile: StoredTile, source: str) -> Offered:
    """Return a stored tile as an offer to the resolver; `where` has all that a `PackSource` needs."""
    where: dict[str, Any] = {"pack": tile.pack, "offset": tile.offset, "length": tile.length}
    if tile.codec is not Codec.RAW:
        where |= {"codec": str(tile.codec), "check": tile.check}
    if tile.base is not None:
        base = tile.base
        where["base"] = {"digest": base.digest, "pack": base.pack, "offset": base.offset, "length": base.length}
        where["base"] |= {"codec": str(base.codec), "check": base.check}
    return Offered(spec=tile.spec, box=tile.box, digest=tile.digest, source=source, where=where)


class PackSource:
    """A source of tiles from packs, by ranges; neighbours that are wanted together are read in one request.

    The stored bytes of an encoded tile, and the base of a difference, are checked before they are used; the caller
    checks the tile itself.
    """

    def __init__(self, store: Store, name: str = "store") -> None:
        self.name = name
        self.little = LITTLE if isinstance(store, Scattering) else _FAR
        self._store = store
        self._ahead: dict[Place, list[memoryview]] = {}
        self._lock = threading.Lock()

    def fetch(self, tile: Offered) -> Bytes:
        """Return a tile's bytes; TileLost if they are missing or damaged, SourceError if the store fails."""
        own, base = places(tile)
        stored = self._stored(own)
        if own.codec is Codec.RAW:
            return stored
        return _decoded(tile.spec, tile.box, own, stored, None if base is None else self.base(tile, base))

    def prefetch(self, tiles: Sequence[Offered]) -> None:
        """Read neighbouring tiles together and keep them until they are fetched."""
        wanted: dict[Place, int] = {}
        for tile in tiles:
            for stored in places(tile):
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

    def fill(self, wanted: Sequence[tuple[Offered, memoryview]]) -> Iterator[tuple[int, SourceError | None]]:
        """Read tiles into their destinations; raw tiles on a local disk take no other memory."""
        raw: dict[Place, list[int]] = {}
        rest = []
        for number, (tile, buffer) in enumerate(wanted):
            own, _ = places(tile)
            if own.codec is Codec.RAW and own.length == buffer.nbytes:
                raw.setdefault((own.pack, own.offset, own.length), []).append(number)
            else:
                rest.append(number)
        for run in runs(sorted(raw), _SCATTERED if isinstance(self._store, Scattering) else _RUN):
            try:
                error = self._read(run, [wanted[raw[place][0]][1] for place in run])
            except Tampered:
                # It may be one of them: each is read by itself.
                rest += [number for place in run for number in raw[place]]
                continue
            for first, *twins in (raw[place] for place in run):
                for twin in twins:
                    wanted[twin][1][:] = wanted[first][1]
                yield from ((number, error) for number in (first, *twins))
        yield from self._fetch_into([(number, *wanted[number]) for number in rest])

    def _fetch_into(
        self, wanted: Sequence[tuple[int, Offered, memoryview]]
    ) -> Iterator[tuple[int, SourceError | None]]:
        try:
            self.prefetch([tile for _, tile, _ in wanted])
        except SourceError:
            pass  # fetch will raise it again for the tiles concerned
        for number, tile, buffer in wanted:
            try:
                data = memoryview(self.fetch(tile))
            except SourceError as error:
                yield number, error
                continue
            if data.nbytes != buffer.nbytes:
                yield number, TileLost(f"{self.name}: {data.nbytes} bytes are not those of {tile.spec.key} {tile.box}")
                continue
            buffer[:] = data.cast("B")
            yield number, None

    def _read(self, run: Sequence[Place], buffers: Sequence[memoryview]) -> SourceError | None:
        """Read neighbouring tiles with one request; return the error that concerns all of them.

        Tampered where some of it, of an encrypted store, is damaged.
        """
        pack, start = run[0][0], run[0][1]
        stop = run[-1][1] + run[-1][2]
        try:
            if isinstance(self._store, Scattering):
                got = self._store.read_into(names.pack(pack), start, list(_with_gaps(run, buffers)))
            else:
                data = memoryview(self._store.get(names.pack(pack), start, stop))
                got = data.nbytes
                for (_, offset, length), buffer in zip(run, buffers, strict=True):
                    if offset - start + length <= got:
                        buffer[:] = data[offset - start : offset - start + length]
        except StoreNotFound as error:
            return TileLost(str(error))
        except Tampered:
            raise
        except StoreError as error:
            return SourceError(str(error))
        return (
            None if got == stop - start else TileLost(f"{names.pack(pack)}: ends before byte {stop}: it is cut short")
        )

    def base(self, tile: Offered, base: Base) -> Bytes:
        """Return the bytes, verified, of the tile that this one is a difference to; TileLost if they are damaged."""
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
        except (StoreNotFound, Tampered) as error:
            raise TileLost(str(error)) from error
        except StoreError as error:
            raise SourceError(str(error)) from error


def places(tile: Offered) -> tuple[Base, Base | None]:
    """Return where the stored bytes of a tile lie, and those of its base."""
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


def _with_gaps(run: Sequence[Place], buffers: Sequence[memoryview]) -> Iterator[memoryview]:
    end = run[0][1]
    for (_, offset, length), buffer in zip(run, buffers, strict=True):
        if offset > end:
            yield memoryview(bytearray(offset - end))
        yield buffer
        end = offset + length


def runs(wanted: Sequence[Place], limit: int = _RUN) -> Iterator[list[Place]]:
    """Yield sorted places in groups worth one request each, of up to `limit` bytes unless a single tile has more.

    Gaps are read too if that saves a request, the smallest first, and never more than a 20th of the wanted bytes.
    """
    slack = sum(length for _, _, length in wanted) // _SLACK
    gaps = {}
    for number in range(1, len(wanted)):
        (pack, offset, length), after = wanted[number - 1], wanted[number]
        if after[0] == pack and 0 <= (gap := after[1] - offset - length) <= _GAP:
            gaps[number] = gap
    joined = set()
    for number in sorted(gaps, key=gaps.__getitem__):
        slack -= gaps[number]
        if slack < 0:
            break
        joined.add(number)
    run: list[Place] = []
    for number, place in enumerate(wanted):
        if run and (number not in joined or place[1] + place[2] - run[0][1] > limit):
            yield run
            run = []
        run.append(place)
    if run:
        yield run

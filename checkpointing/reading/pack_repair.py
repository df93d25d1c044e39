"""Puts good bytes back into a damaged pack.

A pack's id determines every byte of it, so that repairing it needs no permission: the bytes written are those that were
there. It is written only once all of it is whole again. Two readers that repair a pack at once write the same bytes.
Of an encrypted pack, damage takes a whole chunk. One that took the index with it cannot be mended.
"""

from __future__ import annotations

import threading
from typing import cast

from checkpointing.errors import FormatError, SourceError, StoreError, Tampered
from checkpointing.format import names
from checkpointing.format.codecs import Bytes, Codec, decode, encode
from checkpointing.format.encoding import SEALED_CHUNK, hexdigest
from checkpointing.format.manifest import Base
from checkpointing.format.pack import HEAD, check_tiles, read_index
from checkpointing.format.tiles import digest
from checkpointing.reading.packs import PackSource, places
from checkpointing.reading.sources import Offered
from checkpointing.stores.protocol import Store

_LARGEST = 1 << 30  # bytes of the largest pack that is repaired: it is held in memory


class RepairingPackSource(PackSource):
    """A pack source that accepts good bytes from the resolver. They go into the store once they make a pack whole."""

    def __init__(self, store: Store, name: str = "store") -> None:
        super().__init__(store, name)
        self._mending = threading.Lock()
        self._parts: dict[str, dict[int, bytes]] = {}

    def repair(self, tile: Offered, data: Bytes) -> None:
        """Repair a tile, or its base, in its pack; SourceError says why not.

        Bytes for a pack with more damage are kept until those for the rest arrive.
        """
        own, base = places(tile)
        if own.codec is Codec.RAW:
            self._put_back(own, bytes(data))
            return
        try:
            stored = self._readable(names.pack(own.pack), own.offset, own.offset + own.length)
        except StoreError as error:
            raise SourceError(str(error)) from error
        if base is not None and hexdigest(stored) == own.check:
            # The difference is whole, so that the base must be damaged: tile and difference give the base.
            base_data = decode(own.codec, stored, tile.nbytes, tile.spec.itemsize, data)
            if digest(tile.spec, tile.box, memoryview(base_data)) != base.digest:
                raise SourceError(f"{names.pack(own.pack)} at {own.offset}: was not a difference to its base")
            self._put_back(base, bytes(encode(base.codec, base_data, tile.spec.itemsize)))
        else:
            under = None if base is None else self.base(tile, base)
            self._put_back(own, bytes(encode(own.codec, data, tile.spec.itemsize, under)))

    def _put_back(self, place: Base, stored: bytes) -> None:
        name = names.pack(place.pack)
        if len(stored) != place.length or (place.codec is not Codec.RAW and hexdigest(stored) != place.check):
            raise SourceError(f"{name} at {place.offset}: this version of zstd encodes it in another way")
        with self._mending:
            parts = self._parts.setdefault(place.pack, {})
            parts[place.offset] = stored
            try:
                size = self._store.size(name)
                if size > _LARGEST:
                    raise SourceError(f"{name}: is too large to be mended in memory")
                data = bytearray(self._readable(name, 0, size))
                data[: len(HEAD)] = HEAD
                for offset, part in parts.items():
                    data[offset : offset + len(part)] = part
                whole = cast(Store, _Loaded(data))
                tiles, _ = read_index(whole, name, place.pack)
                bad = [tile for tile, good in check_tiles(whole, name, tiles) if not good]
                if bad:
                    raise SourceError(f"{name}: {len(bad)} more tiles of it are damaged, {bad[0].spec.key} among them")
                self._store.put(name, bytes(data))
            except (StoreError, FormatError) as error:
                raise SourceError(f"{name}: cannot be mended: {error}") from error
            del self._parts[place.pack]

    def _readable(self, name: str, start: int, stop: int) -> bytes:
        """Return bytes of a pack, zeros in the place of those that can no longer be decrypted."""
        try:
            return self._store.get(name, start, stop)
        except Tampered:
            middle = (start + stop + SEALED_CHUNK) // 2 // SEALED_CHUNK * SEALED_CHUNK
            if not start < middle < stop:
                return bytes(stop - start)
        return self._readable(name, start, middle) + self._readable(name, middle, stop)


class _Loaded:
    """One object in memory, with as much of a store as checking a pack needs."""

    def __init__(self, data: bytearray) -> None:
        self._data = data

    def size(self, name: str) -> int:
        return len(self._data)

    def get(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        return bytes(self._data[start:stop])

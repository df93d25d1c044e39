"""The tiles of a save's parent, which it can refer to."""

from __future__ import annotations

from collections.abc import Callable

from checkpointing.errors import FormatError, StoreError
from checkpointing.format import names
from checkpointing.format.codecs import Bytes, Codec, decode
from checkpointing.format.encoding import hexdigest
from checkpointing.format.manifest import Base, StoredTile
from checkpointing.format.tiles import Box, TensorSpec, digest
from checkpointing.reading.reader import Checkpoint

Recall = Callable[[TensorSpec, Box], Bytes | None]


class Bases:
    """The tiles of a parent, by contents and by place; empty without a parent."""

    def __init__(self, parent: Checkpoint | None, recall: Recall | None = None) -> None:
        """Index the tiles of `parent`. recall: returns bytes of an older state that need not come from the store."""
        tiles = parent.tiles if parent is not None else ()
        self._parent, self._recall = parent, recall
        # The first of equal tiles counts, so that the same save refers to the same one again.
        self._contents = {tile.digest: tile for tile in reversed(tiles)}
        self._places = {(tile.spec, tile.box): tile for tile in tiles}

    @property
    def name(self) -> str | None:
        """The parent's name."""
        return self._parent.name if self._parent is not None else None

    def same(self, spec: TensorSpec, box: Box, tile_digest: str) -> StoredTile | None:
        """Return a tile with these contents, preferably the one at the same place."""
        here = self._places.get((spec, box))
        return here if here is not None and here.digest == tile_digest else self._contents.get(tile_digest)

    def older(self, spec: TensorSpec, box: Box) -> Base | None:
        """Return the tile that a difference would refer to: the parent's here, or if that is a difference, its base."""
        here = self._places.get((spec, box))
        if here is None or here.base is not None:
            return here.base if here is not None else None
        return Base(
            digest=here.digest,
            pack=here.pack,
            offset=here.offset,
            length=here.length,
            codec=here.codec,
            check=here.check,
        )

    def size(self, pack: str) -> int:
        """Return the size of a pack that the parent's tiles are in."""
        assert self._parent is not None
        return self._parent.packs[pack]

    def fetch(self, spec: TensorSpec, box: Box, base: Base) -> Bytes | None:
        """Return the bytes of an older tile, verified; None if no good copy is found."""
        assert self._parent is not None
        if self._recall is not None:
            recalled = self._recall(spec, box)
            # A copy: what has the digest is what is used, whatever happens to that memory.
            copied = None if recalled is None else bytes(recalled)
            if copied is not None and digest(spec, box, copied) == base.digest:
                return copied
        nbytes = box.numel * spec.itemsize
        try:
            stored = self._parent.store.get(names.pack(base.pack), base.offset, base.offset + base.length)
            if base.codec is not Codec.RAW and hexdigest(stored) != base.check:
                return None
            data = decode(base.codec, stored, nbytes, spec.itemsize)
        except (StoreError, FormatError):
            return None  # the tile is then written whole, which is right whatever happened to the older one
        return data if digest(spec, box, memoryview(data)) == base.digest else None

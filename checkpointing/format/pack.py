"""Packs: tiles back to back, with an index that lets a pack check itself (format.md, section 5)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import blake3

from checkpointing.errors import Corrupt, FormatError
from checkpointing.format.codecs import Codec, fits
from checkpointing.format.encoding import FORMAT, LARGEST, VERSION, check_header, hexdigest, pack_json, unpack_json
from checkpointing.format.fields import Fields
from checkpointing.format.tiles import Box, TensorSpec, digest
from checkpointing.stores.protocol import Store

HEAD = b"E3DPACK1"
_END = b"E3DPEND1"
TAIL = 8 + 8 + 32 + len(_END)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackTile:
    """One tile in a pack's index: its description, and the bytes [offset, offset + length) that it takes.

    check: the digest of the stored bytes, "" for RAW. base: for XOR_PLANES, the digest of the tile it differs from.
    """

    spec: TensorSpec
    box: Box
    digest: str
    offset: int
    length: int
    codec: Codec = Codec.RAW
    check: str = ""
    base: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """One tile to be put into a pack: its description and its stored bytes. check, base: as in `PackTile`."""

    spec: TensorSpec
    box: Box
    digest: str
    data: memoryview
    codec: Codec = Codec.RAW
    check: str = ""
    base: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackPlan:
    """A pack that can be written: its id, its size, where each tile goes, and its bytes as views of the tiles'."""

    id: str
    size: int
    tiles: tuple[PackTile, ...]
    chunks: tuple[bytes | memoryview, ...]


def plan_pack(contents: Sequence[Content]) -> PackPlan:
    """Return the pack of these tiles in the given order; nothing is copied."""
    entries, offset = [], len(HEAD)
    for content in contents:
        entries.append(
            PackTile(
                spec=content.spec,
                box=content.box,
                digest=content.digest,
                offset=offset,
                length=content.data.nbytes,
                codec=content.codec,
                check=content.check,
                base=content.base,
            )
        )
        offset += content.data.nbytes
    index = pack_json(
        {
            "format": FORMAT,
            "version": VERSION,
            "kind": "pack",
            "tiles": [
                {
                    "key": entry.spec.key,
                    "dtype": entry.spec.dtype,
                    "shape": entry.spec.shape,
                    "start": entry.box.start,
                    "stop": entry.box.stop,
                    "digest": entry.digest,
                    "offset": entry.offset,
                    "length": entry.length,
                    "codec": entry.codec,
                    **({"check": entry.check} if entry.check else {}),
                    **({"base": entry.base} if entry.base else {}),
                }
                for entry in entries
            ],
        }
    )
    tail = offset.to_bytes(8, "little") + len(index).to_bytes(8, "little") + blake3.blake3(index).digest() + _END
    return PackPlan(
        id=hexdigest(index),
        size=offset + len(index) + len(tail),
        tiles=tuple(entries),
        chunks=(HEAD, *(content.data for content in contents), index, tail),
    )


def read_index(store: Store, name: str, pack_id: str) -> tuple[tuple[PackTile, ...], int]:
    """Return the index of the pack object `name` and the pack's size, having checked everything but tile bytes.

    Corrupt or FormatError if head, tail, index and the pack's name do not agree.
    """
    size = store.size(name)
    if size < len(HEAD) + TAIL:
        raise Corrupt(f"{name}: {size} bytes are too few for a pack: it is cut short")
    tail = store.get(name, size - TAIL, size)
    offset, length = int.from_bytes(tail[:8], "little"), int.from_bytes(tail[8:16], "little")
    if tail[48:] != _END or length > LARGEST or offset + length + TAIL != size or offset < len(HEAD):
        raise Corrupt(f"{name}: its tail is damaged, or it is cut short")
    if store.get(name, 0, len(HEAD)) != HEAD:
        raise Corrupt(f"{name}: its first bytes are damaged")
    stored = store.get(name, offset, offset + length)
    if blake3.blake3(stored).digest() != tail[16:48]:
        raise Corrupt(f"{name}: its index does not match the digest in its tail")
    if tail[16:48].hex() != pack_id:
        raise Corrupt(f"{name}: is a pack of another id, {tail[16:48].hex()}")
    tiles = tuple(_tiles(Fields(check_header(unpack_json(stored, name), "pack", name), name), name))
    end = len(HEAD)
    for tile in tiles:
        if tile.offset != end:
            raise FormatError(f"{name}: tile {tile.spec.key} {tile.box} does not begin where the one before it ends")
        end += tile.length
    if end != offset:
        raise FormatError(f"{name}: its tiles end at {end}, its index begins at {offset}")
    return tiles, size


def check_tiles(store: Store, name: str, tiles: Sequence[PackTile]) -> Iterator[tuple[PackTile, bool]]:
    """Read every tile of a pack; yield each, and whether its bytes have its digest. One tile is in memory at a time."""
    for tile in tiles:
        data = store.get(name, tile.offset, tile.offset + tile.length)
        yield tile, whole(tile, data)


def whole(tile: PackTile, stored: bytes | memoryview) -> bool:
    """Return whether these stored bytes are the tile's, without decoding them."""
    if memoryview(stored).nbytes != tile.length:
        return False
    return hexdigest(stored) == tile.check if tile.check else digest(tile.spec, tile.box, stored) == tile.digest


def _tiles(index: Fields, name: str) -> Iterator[PackTile]:
    for item in index.items("tiles"):
        fields = Fields(item, name)
        spec = fields.spec()
        box = fields.box(spec)
        codec = fields.codec()
        tile = PackTile(
            spec=spec,
            box=box,
            digest=fields.digest("digest"),
            offset=fields.integer("offset"),
            length=fields.integer("length"),
            codec=codec,
            check="" if codec is Codec.RAW else fields.digest("check"),
            base=fields.digest("base") if codec is Codec.XOR_PLANES else "",
        )
        if not fits(codec, tile.length, box.numel * spec.itemsize):
            raise fields.fail(f"{spec.key} {box}: {tile.length} stored bytes are not those of its box")
        yield tile

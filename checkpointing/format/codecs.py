"""How a tile's bytes are stored: as they are, as compressed byte planes, or as their difference to an older tile's.

Floating-point numbers do not compress as they are, but their exponents do: byte planes put the n-th byte of every
element together (the transposition that blosc calls *shuffle*). The difference to an older copy is an exclusive or, so
that it is exact. The codecs are specified in format.md, section 5; the saver decides which one is worth its time.
"""

from __future__ import annotations

from enum import StrEnum

import numpy as np
import zstandard

from checkpointing.errors import Corrupt

Bytes = bytes | bytearray | memoryview


class Codec(StrEnum):
    """How a tile's bytes are stored; the format's own words."""

    RAW = "raw"
    PLANES = "planes"
    XOR_PLANES = "xor-planes"


LEVEL = 1
"""zstd's level: each higher one costs more than it saves here."""


def fits(codec: Codec, length: int, nbytes: int) -> bool:
    """Return whether a tile of `nbytes` can have `length` stored bytes: never more than its own."""
    return length == nbytes if codec is Codec.RAW else 0 < length < nbytes


def encode(codec: Codec, data: Bytes, itemsize: int, base: Bytes | None = None) -> Bytes:
    """Return the stored bytes of a tile. base: the older tile's bytes, equally many, for XOR_PLANES only."""
    if codec is Codec.RAW:
        return data
    flat = np.frombuffer(data, dtype=np.uint8)
    if codec is Codec.XOR_PLANES:
        assert base is not None
        flat = flat ^ np.frombuffer(base, dtype=np.uint8)
    planes = np.ascontiguousarray(flat.reshape(-1, itemsize).T)
    return zstandard.ZstdCompressor(level=LEVEL, write_content_size=True).compress(planes.data)


def decode(codec: Codec, stored: Bytes, nbytes: int, itemsize: int, base: Bytes | None = None) -> Bytes:
    """Return the `nbytes` bytes of a tile; Corrupt if `stored` holds another number. Allocates no more than that."""
    if codec is Codec.RAW:
        data = stored
    else:
        try:
            if zstandard.frame_content_size(stored) != nbytes:
                raise Corrupt(f"a tile of {nbytes} bytes is stored as something else")
            planes = zstandard.ZstdDecompressor().decompress(stored, max_output_size=nbytes)
        except zstandard.ZstdError as error:
            raise Corrupt(f"a tile of {nbytes} bytes is no zstd frame: {error}") from error
        flat = np.ascontiguousarray(np.frombuffer(planes, dtype=np.uint8).reshape(itemsize, -1).T).reshape(-1)
        if codec is Codec.XOR_PLANES:
            if base is None or memoryview(base).nbytes != nbytes:
                raise Corrupt(f"a tile of {nbytes} bytes has a base of another length")
            flat = flat ^ np.frombuffer(base, dtype=np.uint8)
        data = flat.data
    if memoryview(data).nbytes != nbytes:
        raise Corrupt(f"{memoryview(data).nbytes} bytes are stored of a tile of {nbytes}")
    return data

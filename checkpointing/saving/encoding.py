"""Chooses a tile's codec among those that the save may use.

What is encoded is a copy that has the tile's digest: the tile's own bytes may have changed since that was taken.
"""

from __future__ import annotations

from dataclasses import dataclass

from checkpointing.errors import Corrupt
from checkpointing.format.codecs import Bytes, Codec, encode
from checkpointing.format.encoding import hexdigest
from checkpointing.format.manifest import Base
from checkpointing.format.pack import Content
from checkpointing.format.stats import Stats
from checkpointing.format.tiles import Box, Piece, TensorSpec, digest
from checkpointing.saving.bases import Bases
from checkpointing.saving.options import Choice

WORTH = 1.05
"""The least tile bytes per stored byte for which a tile is encoded at all."""
_STEPS = frozenset({"bfloat16", "float16"})  # an optimizer step changes few bits of these, but most of wider ones
_FRESH = 2.0  # a difference worth less has too old a base: a tile stored by itself can be the next one


@dataclass(frozen=True, slots=True, kw_only=True)
class Hashed:
    """A tile with what was computed from its bytes."""

    piece: Piece
    digest: str
    """Of its bytes, "" where only their codec is tried."""
    stats: Stats


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """A tile as it goes into a pack, and the place of the base that it is a difference to."""

    content: Content
    stats: Stats
    base: Base | None = None


def encode_tile(tile: Hashed, choice: Choice, bases: Bases) -> Encoded:
    """Return a tile's stored bytes; the same tile, choice and bases give the same bytes.

    RAW leaves it as it is. PLANES encodes it if that is worth it. XOR does too, and stores 16-bit floats as their
    difference to the parent's tile if that halves them, or at least makes them shorter than their planes. Corrupt if
    its bytes, where they are encoded, do not have its digest any more; what is raw is looked at when it is sent.
    """
    spec, box, data = tile.piece.spec, tile.piece.box, tile.piece.data
    best: tuple[Bytes, Codec, Base | None] = (data, Codec.RAW, None)
    shortest = data.nbytes / WORTH
    if choice is not Choice.RAW and tile.digest:
        data = memoryview(bytes(data))
        if digest(spec, box, data) != tile.digest:
            raise changed(spec, box)
    if choice is Choice.XOR and spec.dtype in _STEPS and (base := bases.older(spec, box)) is not None:
        older = bases.fetch(spec, box, base)
        if older is not None:
            stored = encode(Codec.XOR_PLANES, data, spec.itemsize, older)
            if len(stored) <= shortest:
                best, shortest = (stored, Codec.XOR_PLANES, base), len(stored)
    if choice is not Choice.RAW and shortest > data.nbytes / _FRESH:
        stored = encode(Codec.PLANES, data, spec.itemsize)
        if len(stored) <= shortest:
            best = (stored, Codec.PLANES, None)
    stored, codec, base_used = best
    content = Content(
        spec=spec,
        box=box,
        digest=tile.digest,
        data=memoryview(stored),
        codec=codec,
        check="" if codec is Codec.RAW else hexdigest(memoryview(stored)),
        base=base_used.digest if base_used is not None else "",
    )
    return Encoded(content=content, stats=tile.stats, base=base_used)


def changed(spec: TensorSpec, box: Box) -> Corrupt:
    """Return the error for a tile whose bytes no longer have its digest."""
    return Corrupt(
        f"{spec.key} {box}: its bytes changed in memory after their digest was taken, and were not written. A save of "
        "a newer state helps; if this happens again, have the machine's memory tested"
    )

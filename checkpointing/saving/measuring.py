"""Measures how fast codecs are here, and how well they compress a save's tiles, for `auto` to decide from."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from checkpointing.format.tiles import Piece
from checkpointing.saving.bases import Bases
from checkpointing.saving.encoding import Hashed, encode_tile
from checkpointing.saving.options import Choice, Speeds, Trial

_SAMPLES = 8


def measure(store: float, tiles: Sequence[Piece], bases: Bases, clock: Callable[[], float]) -> Speeds:
    """Return the measured speeds: `store`, in bytes per second, and each codec's on a few of a save's tiles.

    Fetching the older tiles is part of what a difference costs.
    """
    stride = max(1, len(tiles) // _SAMPLES)
    samples = tiles[stride // 2 :: stride][:_SAMPLES]
    differs = any(bases.older(tile.spec, tile.box) is not None for tile in samples)
    return Speeds(
        store=store,
        planes=_trial(samples, Choice.PLANES, bases, clock),
        xor=_trial(samples, Choice.XOR, bases, clock) if differs else None,
    )


def _trial(tiles: Sequence[Piece], choice: Choice, bases: Bases, clock: Callable[[], float]) -> Trial:
    began = clock()
    stored = 0
    for tile in tiles:
        stored += encode_tile(Hashed(piece=tile, digest="", stats=None), choice, bases).content.data.nbytes
    seconds = max(clock() - began, 1e-9)
    nbytes = sum(tile.data.nbytes for tile in tiles)
    return Trial(rate=nbytes / seconds, ratio=nbytes / stored)

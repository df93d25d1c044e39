"""How fast codecs are here, and what they make of these tiles: what `auto` decides from."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from checkpointing.saving.bases import Bases
from checkpointing.saving.encoding import Hashed, encode_tile
from checkpointing.saving.options import Choice, Speeds, Trial

_SAMPLES = 4


def measure(store: float, tiles: Sequence[Hashed], bases: Bases, clock: Callable[[], float]) -> Speeds:
    """Return what was measured: `store`, in bytes per second, and how each codec does on a few of these tiles.

    Fetching the older tiles is part of what a difference costs.
    """
    samples = tiles[:: max(1, len(tiles) // _SAMPLES)][:_SAMPLES]
    differs = any(bases.older(tile.piece.spec, tile.piece.box) is not None for tile in samples)
    return Speeds(
        store=store,
        planes=_trial(samples, Choice.PLANES, bases, clock),
        xor=_trial(samples, Choice.XOR, bases, clock) if differs else None,
    )


def _trial(tiles: Sequence[Hashed], choice: Choice, bases: Bases, clock: Callable[[], float]) -> Trial:
    began = clock()
    stored = sum(encode_tile(tile, choice, bases).content.data.nbytes for tile in tiles)
    seconds = max(clock() - began, 1e-9)
    nbytes = sum(tile.piece.data.nbytes for tile in tiles)
    return Trial(rate=nbytes / seconds, ratio=nbytes / stored)

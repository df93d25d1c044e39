"""The options of a save."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from checkpointing.format.announcement import ANNOUNCED_AFTER
from checkpointing.format.fields import LARGEST_TILE
from checkpointing.format.grid import TILE_BYTES

TRANSFERS = 4
PACK_BYTES = 32 << 20


class Choice(StrEnum):
    """Which codecs a save may use; `checkpointing.saving.encoding` chooses for each tile."""

    RAW = "raw"
    PLANES = "planes"
    XOR = "xor"
    AUTO = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A codec's results on some tiles. rate: tile bytes per second and thread. ratio: tile bytes per stored byte."""

    rate: float
    ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """The measurements of an `auto` save. store: stored bytes per second of all transfers together.

    xor: None if no tile had an older one to differ from.
    """

    store: float
    planes: Trial
    xor: Trial | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveOptions:
    """How a rank saves."""

    codec: Choice | str = Choice.RAW
    """How tiles are encoded: "raw"; "planes"; "xor" (against the parent, where that is worth it); "auto" (by
    measuring)."""
    pack_bytes: int = PACK_BYTES
    """The most tile bytes in a pack."""
    tile_bytes: int = TILE_BYTES
    """The most bytes of a tile, up to 64 MiB: larger ones make manifests shorter, smaller ones let another layout read
    less in vain. Tiles are kept from a parent that was cut alike."""
    transfers: int = TRANSFERS
    """Packs under way at once."""
    max_bandwidth: float | None = None
    """Bytes per second of all transfers together; None for no bound."""
    check: bool = True
    """Read packs back, unless the store compares checksums itself."""
    workers: int = 2
    """Threads that compute digests."""
    rewrite: bool = False
    """Write packs even if objects of their name and size are there, because one of them was found damaged."""
    announce_after: float = ANNOUNCED_AFTER
    """Seconds after which a save announces to collections that it is under way."""
    speeds: Speeds | None = None
    """The measurements of an earlier `auto` save, which alone then decide; None, the default, to measure."""

    def __post_init__(self) -> None:
        if self.codec not in list(Choice):
            raise ValueError(f"codec {self.codec!r} is none of {', '.join(Choice)}")
        for field in ("pack_bytes", "tile_bytes", "transfers", "workers"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} is {getattr(self, field)}; it is at least 1")
        if self.tile_bytes > LARGEST_TILE:
            raise ValueError(f"tile_bytes is {self.tile_bytes}; readers refuse tiles of more than {LARGEST_TILE} bytes")
        if self.max_bandwidth is not None and not self.max_bandwidth > 0:
            raise ValueError(f"max_bandwidth is {self.max_bandwidth}; give bytes per second above 0, or None")

    @property
    def choice(self) -> Choice:
        """The codec, or instead of AUTO the one that follows from `speeds`; AUTO if nothing has been measured yet."""
        chosen = Choice(self.codec)
        return choose(self.speeds, self.transfers) if chosen is Choice.AUTO and self.speeds else chosen

    def limit(self, left: int) -> int:
        """Return the most tile bytes in the next pack, if `left` are still to be saved.

        Packs become smaller towards the end, so that all transfers end together, and a writer that dies loses little
        compared to what is left.
        """
        return min(self.pack_bytes, max(_SMALL, left // _PARTS))


_SMALL = 4 << 20
_PARTS = 8
_WORTH = 1.1  # a codec that makes the save less than a tenth faster is not worth its processor time


def choose(speeds: Speeds, threads: int) -> Choice:
    """Return the choice with which a save ends soonest: `threads` encode while the store takes encoded packs."""
    best, fastest = Choice.RAW, speeds.store * _WORTH
    for choice, trial in ((Choice.PLANES, speeds.planes), (Choice.XOR, speeds.xor)):
        if trial is not None:
            rate = min(trial.rate * threads, speeds.store * trial.ratio)
            if rate > fastest:
                best, fastest = choice, rate
    return best

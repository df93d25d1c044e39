"""What keepers' memory has on offer to a restore, said shard by shard and spelled out in tiles where it is wanted.

A snapshot has many thousand tiles and few hundred shards, every rank hears of all of them, and needs a few.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from checkpointing.format.tiles import Box, TensorSpec
from checkpointing.reading.sources import Offered
from elastic3d.snapshots import table as tables
from elastic3d.snapshots.table import DIGEST_DIGITS, BoxExtent


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferedShard:
    """One box of a rank's snapshot, as a tile server has it in its memory."""

    spec: TensorSpec
    """The tensor."""
    box: Box
    """Which part of it."""
    source: str
    """The server's address."""
    generation: int
    """That made the snapshot."""
    step: int
    """It was made after this one."""
    rank: int
    """Whose it is, in that generation."""
    offset: int
    """Where its bytes begin in the snapshot."""
    tile_bytes: int
    """The most of a tile it is cut into."""
    digests: str
    """Of its tiles, one after the other, in hex."""

    def tiles(self) -> Iterator[Offered]:
        """Yield its tiles as the resolver takes them."""
        shard = BoxExtent(spec=self.spec, box=self.box, offset=self.offset)
        for number, (box, offset, nbytes) in enumerate(tables.cut(shard, self.tile_bytes)):
            yield Offered(
                spec=self.spec,
                box=box,
                digest=self.digests[number * DIGEST_DIGITS : (number + 1) * DIGEST_DIGITS],
                source=self.source,
                where=[self.generation, self.step, self.rank, offset, nbytes],
            )


def spell_out(offers: Iterable[Offered | OfferedShard], wanted: Iterable[tuple[TensorSpec, Box]]) -> Iterator[Offered]:
    """Yield offers tile by tile; of shards only those that have something in common with what is wanted."""
    boxes: dict[str, list[Box]] = {}
    for spec, box in wanted:
        boxes.setdefault(spec.key, []).append(box)
    for offer in offers:
        if isinstance(offer, Offered):
            yield offer
        elif _meets(offer, boxes):
            yield from offer.tiles()


def _meets(offer: OfferedShard, wanted: Mapping[str, Sequence[Box]]) -> bool:
    for box in wanted.get(offer.spec.key, ()):
        # One of another tensor of that name is not left out: the resolver says what is wrong.
        if len(box.start) != len(offer.box.start) or box.intersect(offer.box) is not None:
            return True
    return False

"""What keepers' memory has on offer to a restore, said shard by shard and spelled out in tiles where it is wanted.

A snapshot has many thousand tiles and few hundred shards, every rank hears of all of them, and needs a few. What two
servers hold alike is one shard, and of its tiles the second copies are spelled out only where a first one did not do.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

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
    copies: tuple[str, ...] = ()
    """Addresses of other servers that hold the same."""
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

    @property
    def sources(self) -> tuple[str, ...]:
        """All servers that hold it."""
        return (self.source, *self.copies)

    def tiles(self, source: str | None = None) -> Iterator[Offered]:
        """Yield its tiles as the resolver takes them, from one of its servers: the first if none is named."""
        source = self.source if source is None else source
        shard = BoxExtent(spec=self.spec, box=self.box, offset=self.offset)
        for number, (box, offset, nbytes) in enumerate(tables.cut(shard, self.tile_bytes)):
            yield Offered(
                spec=self.spec,
                box=box,
                digest=self.digests[number * DIGEST_DIGITS : (number + 1) * DIGEST_DIGITS],
                source=source,
                where=[self.generation, self.step, self.rank, offset, nbytes],
            )


class SpelledOut(list[Offered]):
    """Tiles on offer, and more of them for a tensor of which those turn out not to suffice."""

    def __init__(self, tiles: Iterable[Offered], spare: Mapping[str, Sequence[tuple[OfferedShard, str]]]) -> None:
        super().__init__(tiles)
        self._spare = spare

    def spare(self, key: str) -> Iterable[Offered]:
        """Return the second copies of a tensor's tiles, those of preferred sources first."""
        return [tile for shard, source in self._spare.get(key, ()) for tile in shard.tiles(source)]


@runtime_checkable
class Selecting(Protocol):
    """Offers that find out by themselves which of them are of use."""

    def meeting(self, wanted: Mapping[str, Sequence[Box]]) -> Iterable[Offered | OfferedShard]:
        """Return those that have an element in common with a wanted box, by key, of their tensor."""
        ...


def spell_out(
    offers: Iterable[Offered | OfferedShard],
    wanted: Iterable[tuple[TensorSpec, Box]],
    sources: Iterable[str],
) -> SpelledOut:
    """Return offers tile by tile; of shards, and of `Selecting` offers, only those of use for what is wanted.

    sources: in the order in which they are preferred. Tiles of a shard are of the best source that has them.
    """
    order = {name: place for place, name in enumerate(sources)}
    boxes: dict[str, list[Box]] = {}
    for spec, box in wanted:
        boxes.setdefault(spec.key, []).append(box)
    tiles: list[Offered] = []
    spare: defaultdict[str, list[tuple[OfferedShard, str]]] = defaultdict(list)
    for offer in offers.meeting(boxes) if isinstance(offers, Selecting) else offers:
        if isinstance(offer, Offered):
            tiles.append(offer)
        elif _meets(offer, boxes):
            best, *others = sorted(offer.sources, key=order.__getitem__) if offer.copies else offer.sources
            tiles.extend(offer.tiles(best))
            spare[offer.spec.key].extend((offer, source) for source in others)
    for copies in spare.values():
        copies.sort(key=lambda copy: order[copy[1]])
    return SpelledOut(tiles, spare)


def _meets(offer: OfferedShard, wanted: Mapping[str, Sequence[Box]]) -> bool:
    for box in wanted.get(offer.spec.key, ()):
        # One of another tensor of that name is not left out: the resolver says what is wrong.
        if len(box.start) != len(offer.box.start) or box.intersect(offer.box) is not None:
            return True
    return False

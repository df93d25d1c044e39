"""A committed checkpoint by its documents: record and rank manifests, read and checked; no pack is read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from checkpointing.format import names
from checkpointing.format.manifest import RankManifest, StoredTile, order
from checkpointing.format.record import Record
from checkpointing.format.tiles import Box, TensorSpec
from checkpointing.reading.reader import check_record, read_manifests, read_record
from checkpointing.stores.protocol import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """Stored bytes of a tile: `length` bytes from `offset` of a pack."""

    pack: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointDocuments:
    """One checkpoint. `tiles` are distinct by tensor and box, in order; `packs` maps ids to sizes.

    modified: when the record was written, in seconds by the store's own clock; 0.0 if that was not asked for.
    """

    record: Record
    ranks: tuple[RankManifest, ...]
    specs: dict[str, TensorSpec]
    tiles: tuple[StoredTile, ...]
    packs: dict[str, int]
    modified: float = 0.0

    @property
    def name(self) -> str:
        """The checkpoint's name."""
        return self.record.checkpoint

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(spec.box.numel * spec.itemsize for spec in self.specs.values())


def find(store: Store, name: str, *, expected: str | None = None, modified: float = 0.0) -> CheckpointDocuments:
    """Read a checkpoint's record and manifests; NoCheckpoint if it is not there, FormatError if it is damaged."""
    record = read_record(store, name, expected)
    manifests = read_manifests(store, record.manifests)
    check_record(record, manifests)
    return assemble(record, manifests, modified=modified)


def assemble(record: Record, manifests: Sequence[RankManifest], *, modified: float = 0.0) -> CheckpointDocuments:
    """Return the checkpoint made of a record and its manifests."""
    tiles: dict[tuple[str, Box], StoredTile] = {}
    for manifest in manifests:
        for tile in manifest.tiles:
            tiles.setdefault((tile.spec.key, tile.box), tile)  # a reader takes the first of several copies
    return CheckpointDocuments(
        record=record,
        ranks=tuple(manifests),
        specs={spec.key: spec for manifest in manifests for spec in sorted(manifest.specs, key=lambda spec: spec.key)},
        tiles=tuple(sorted(tiles.values(), key=order)),
        packs={pack: size for manifest in manifests for pack, size in manifest.packs.items()},
        modified=modified,
    )


def extents(tile: StoredTile) -> Iterator[Extent]:
    """Yield the extents that must be read for a tile: its own, and that of its base."""
    yield Extent(pack=tile.pack, offset=tile.offset, length=tile.length)
    if tile.base is not None:
        yield Extent(pack=tile.base.pack, offset=tile.base.offset, length=tile.base.length)


def times(store: Store) -> dict[str, float]:
    """Return when each record was written, by the store's own clock."""
    listed = ((names.parse_record(entry.name), entry.modified) for entry in store.entries(names.CHECKPOINTS))
    return {name: modified for name, modified in listed if name is not None}

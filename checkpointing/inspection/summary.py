"""One checkpoint on a page: its contents, its writers and its ancestors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from checkpointing.errors import FormatError, NoCheckpoint
from checkpointing.format import names
from checkpointing.format.manifest import StoredTile
from checkpointing.inspection.documents import CheckpointDocuments, extents
from checkpointing.inspection.writers import Writers, writers
from checkpointing.reading.reader import read_manifests, read_record
from checkpointing.stores.protocol import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Some of a checkpoint's tiles: their number, their bytes, and their stored bytes."""

    tiles: int
    bytes: int
    stored: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ancestor:
    """A checkpoint from which a later one took unchanged tiles. there: whether it can still be read."""

    checkpoint: str
    there: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The contents of `show`. codecs, dtypes: shares of the tiles. lineage: the parent, its parent, and so on."""

    checkpoint: str
    step: int
    made_in: int
    attempt: int
    committed_in: int
    root: str
    modified: float
    labels: tuple[str, ...]
    tensors: int
    tiles: int
    bytes: int
    stored: int
    packs: int
    pack_bytes: int
    codecs: dict[str, Share]
    dtypes: dict[str, Share]
    writers: Writers
    lineage: tuple[Ancestor, ...]
    facts: Mapping[str, Any]


def summarise(
    documents: CheckpointDocuments, labels: tuple[str, ...] = (), lineage: tuple[Ancestor, ...] = ()
) -> Summary:
    """Return the page about a checkpoint."""
    save = documents.record.save
    return Summary(
        checkpoint=documents.name,
        step=save.step,
        made_in=save.made_in,
        attempt=save.attempt,
        committed_in=documents.record.committed_in,
        root=documents.record.root,
        modified=documents.modified,
        labels=labels,
        tensors=len(documents.specs),
        tiles=len(documents.tiles),
        bytes=documents.nbytes,
        stored=sum(extent.length for extent in {extent for tile in documents.tiles for extent in extents(tile)}),
        packs=len(documents.packs),
        pack_bytes=sum(documents.packs.values()),
        codecs=_shares(documents.tiles, lambda tile: str(tile.codec)),
        dtypes=_shares(documents.tiles, lambda tile: tile.spec.dtype),
        writers=writers(documents.ranks),
        lineage=lineage,
        facts=documents.record.facts,
    )


def _shares(tiles: Iterable[StoredTile], by: Callable[[StoredTile], str]) -> dict[str, Share]:
    groups: dict[str, list[StoredTile]] = defaultdict(list)
    for tile in tiles:
        groups[by(tile)].append(tile)
    shares = {
        name: Share(tiles=len(own), bytes=sum(t.nbytes for t in own), stored=sum(t.length for t in own))
        for name, own in groups.items()
    }
    return dict(sorted(shares.items(), key=lambda item: (-item[1].bytes, item[0])))


def lineage(store: Store, documents: CheckpointDocuments, most: int) -> tuple[Ancestor, ...]:
    """Follow parents back, `most` of them at most; reads the record and one manifest of each."""
    ancestors: list[Ancestor] = []
    seen: set[str] = {documents.name}
    parent = documents.ranks[0].parent
    while parent is not None and parent not in seen and len(ancestors) < most:
        seen.add(parent)
        try:
            first = read_record(store, parent).manifests[:1]
            (manifest,) = read_manifests(store, first)
        except (NoCheckpoint, FormatError):
            ancestors.append(Ancestor(checkpoint=parent, there=False))
            break
        ancestors.append(Ancestor(checkpoint=parent, there=True))
        parent = manifest.parent
    return tuple(ancestors)


def generations(checkpoint: str) -> tuple[int, int, int]:
    """Return from a checkpoint's name its step, and the generations that made and committed it."""
    parsed = names.parse_checkpoint(checkpoint)
    assert parsed is not None, checkpoint
    return parsed[0].step, parsed[0].made_in, parsed[1]

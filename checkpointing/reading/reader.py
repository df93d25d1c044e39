"""Opens a checkpoint: from a ref or a name to tiles, every link checked (format.md, section 10)."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from checkpointing.errors import (
    CommitRefused,
    Corrupt,
    FormatError,
    NoCheckpoint,
    StoreNotFound,
)
from checkpointing.format import names
from checkpointing.format.encoding import LARGEST, hexdigest
from checkpointing.format.manifest import RankManifest, StoredTile, decode_manifest, facts_digest, order
from checkpointing.format.record import ManifestEntry, Record, decode_record, root
from checkpointing.format.refs import Ref
from checkpointing.format.tiles import Box, TensorSpec
from checkpointing.reading.naming import find, read_ref
from checkpointing.reading.pack_repair import RepairingPackSource
from checkpointing.reading.packs import PackSource, offer
from checkpointing.reading.sources import Offered
from checkpointing.saving.coverage import check_complete
from checkpointing.stores.protocol import Store

_READERS = 8
_TRIES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint whose record and manifests have been read and checked; tiles are checked when they are fetched."""

    store: Store
    """The store it is in."""
    name: str
    """Its name."""
    step: int
    """Its step."""
    made_in: int
    """The generation whose training it holds."""
    committed_in: int
    """The generation that committed it."""
    root: str
    """Digest over all its tiles, in hex."""
    facts: dict[str, Any]
    """What the saver added to the tensors, as JSON data."""
    specs: dict[str, TensorSpec]
    """Its tensors, by name."""
    tiles: tuple[StoredTile, ...]
    """Its tiles, distinct by tensor and box."""
    packs: dict[str, int]
    """Sizes in bytes of all packs that its tiles are in, by id."""
    copies: tuple[StoredTile, ...] = ()
    """Copies of tiles that other ranks have written too."""

    def source(self, name: str = "store", *, repair: bool = False) -> PackSource:
        """Return the source that the offers of the same name refer to.

        With `repair` it repairs packs that are found damaged: only then does reading write to the store.
        """
        return RepairingPackSource(self.store, name) if repair else PackSource(self.store, name)

    def offers(self, source: str = "store") -> Iterator[Offered]:
        """Yield every tile as an offer for `checkpointing.reading.resolver.resolve`; further copies last."""
        for tile in (*self.tiles, *self.copies):
            yield offer(tile, source)


def read_latest(store: Store) -> Ref | None:
    """Return the ref `latest`, None if it was never written; FormatError if it is damaged."""
    return read_ref(store)


def open_checkpoint(store: Store, ref_or_name: Ref | str = "latest") -> Checkpoint:
    """Return the checkpoint that a ref points to, or that `resolve_name` finds.

    If a ref moves on while it is followed, and its former target is collected, it is followed again. NoCheckpoint if
    there is none, FormatError (Corrupt, NewerFormat) if it cannot be trusted or read.
    """
    with _no_collections():
        for last in [False] * (_TRIES - 1) + [True]:
            if isinstance(ref_or_name, str):
                name, expected = find(store, ref_or_name)
            elif ref_or_name.checkpoint is None:
                raise NoCheckpoint(f"store {store.url}: nothing was ever committed here")
            else:
                name, expected = ref_or_name.checkpoint, ref_or_name.record_digest
            try:
                return _open(store, name, expected)
            except NoCheckpoint:
                if last:
                    raise
    raise AssertionError("the last try returns or raises")


@contextmanager
def _no_collections() -> Iterator[None]:
    """Keep Python from collecting garbage while manifests are decoded, all of whose objects are kept.

    With torch imported each collection visits a million more objects, which takes as long as all the rest.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def _open(store: Store, name: str, expected: str | None) -> Checkpoint:
    """Return a checkpoint; NoCheckpoint if a collection deletes it meanwhile, which begins with the record."""
    record = read_record(store, name, expected)
    try:
        manifests = read_manifests(store, record.manifests)
    except Corrupt:
        try:
            store.size(names.record(name))
        except StoreNotFound:
            raise NoCheckpoint(f"store {store.url}: checkpoint {name} was collected while it was opened") from None
        raise
    check_record(record, manifests)
    tiles: dict[tuple[str, Box], StoredTile] = {}
    copies = {}
    for tile in (tile for manifest in manifests for tile in manifest.tiles):
        first = tiles.setdefault((tile.spec.key, tile.box), tile)
        if (first.pack, first.offset) != (tile.pack, tile.offset):
            copies[tile.pack, tile.offset, tile.spec.key, tile.box] = tile
    return Checkpoint(
        store=store,
        name=name,
        step=record.save.step,
        made_in=record.save.made_in,
        committed_in=record.committed_in,
        root=record.root,
        facts=record.facts,
        specs={spec.key: spec for manifest in manifests for spec in manifest.specs},
        tiles=tuple(sorted(tiles.values(), key=order)),
        copies=tuple(copies.values()),
        packs={pack: size for manifest in manifests for pack, size in manifest.packs.items()},
    )


def read_record(store: Store, name: str, expected: str | None = None) -> Record:
    """Return the record of the checkpoint `name`; Corrupt if its digest is not the `expected` one."""
    try:
        data = store.get(names.record(name))
    except StoreNotFound as error:
        raise NoCheckpoint(f"store {store.url}: there is no checkpoint {name}") from error
    record = decode_record(data, names.record(name))
    if expected is not None and hexdigest(data) != expected:
        raise Corrupt(f"{names.record(name)}: is not the record the ref points to")
    return record


def read_manifests(store: Store, entries: Sequence[ManifestEntry]) -> list[RankManifest]:
    """Return the manifests of a record, in order of rank; Corrupt if one is not the one recorded."""
    with ThreadPoolExecutor(min(_READERS, len(entries)), thread_name_prefix="manifests") as pool:
        return list(pool.map(lambda entry: _read_manifest(store, entry), entries))


def _read_manifest(store: Store, entry: ManifestEntry) -> RankManifest:
    if entry.size > LARGEST:
        raise FormatError(f"{entry.name}: is recorded with {entry.size} bytes; at most {LARGEST} are accepted")
    try:
        # Whatever lies there, only the recorded size is read, and one byte to see whether there is more.
        data = store.get(entry.name, 0, entry.size + 1)
    except StoreNotFound as error:
        raise Corrupt(f"{entry.name}: is missing") from error
    if hexdigest(data) != entry.digest:
        raise Corrupt(f"{entry.name}: is not the manifest the record points to")
    return decode_manifest(data, entry.name)


def check_record(record: Record, manifests: Sequence[RankManifest]) -> None:
    """Raise FormatError if the manifests are not complete, or not what the record says."""
    try:
        check_complete(manifests, record.save, record.world)
    except CommitRefused as error:
        raise FormatError(f"{record.name}: {error}") from error
    digest = facts_digest(record.facts)
    if digest != manifests[0].facts_digest or root(manifests, digest) != record.root:
        raise Corrupt(f"{record.name}: its root is not that of its tensors and facts")

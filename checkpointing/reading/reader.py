"""Opening a checkpoint: from a ref or a name to tiles, every link checked (format.md, section 10)."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from checkpointing.errors import (
    CommitRefused,
    Corrupt,
    FormatError,
    NoCheckpoint,
    SourceError,
    StoreError,
    StoreNotFound,
)
from checkpointing.format import names
from checkpointing.format.encoding import hexdigest
from checkpointing.format.manifest import RankManifest, StoredTile, decode_manifest, facts_digest, order
from checkpointing.format.record import ManifestEntry, Record, decode_record, root
from checkpointing.format.refs import Ref
from checkpointing.format.tiles import TensorSpec
from checkpointing.reading.naming import find, read_ref
from checkpointing.reading.resolver import Offered
from checkpointing.saving.coverage import check_complete
from checkpointing.stores.protocol import Store

_READERS = 8
_RUN = 16 << 20  # bytes read in one request for neighbouring tiles
_GAP = 64 << 10  # unwanted bytes that are cheaper to read than to ask again


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint whose record and manifests have been read and checked; its tiles are checked when fetched.

    `tiles` are distinct by tensor and box. `packs` maps the ids of all packs they lie in to sizes.
    """

    store: Store
    name: str
    step: int
    made_in: int
    committed_in: int
    root: str
    facts: dict[str, Any]
    specs: dict[str, TensorSpec]
    tiles: tuple[StoredTile, ...]
    packs: dict[str, int]

    def source(self, name: str = "store") -> PackSource:
        """Return the source that the offers of the same name refer to."""
        return PackSource(self.store, name)

    def offers(self, source: str = "store") -> Iterator[Offered]:
        """Yield every tile, for `checkpointing.reading.resolver.resolve`."""
        for tile in self.tiles:
            where = {"pack": tile.pack, "offset": tile.offset, "length": tile.length}
            yield Offered(spec=tile.spec, box=tile.box, digest=tile.digest, source=source, where=where)


def read_latest(store: Store) -> Ref | None:
    """Return the ref `latest`, None when nobody has written it; FormatError when it is damaged."""
    return read_ref(store)


def open_checkpoint(store: Store, ref_or_name: Ref | str = "latest") -> Checkpoint:
    """Return the checkpoint that a ref points to, or that `resolve_name` finds.

    NoCheckpoint when there is none, FormatError (Corrupt, NewerFormat) when it cannot be trusted or read.
    """
    if isinstance(ref_or_name, str):
        name, expected = find(store, ref_or_name)
    elif ref_or_name.checkpoint is None:
        raise NoCheckpoint(f"store {store.url}: nothing was ever committed here")
    else:
        name, expected = ref_or_name.checkpoint, ref_or_name.record_digest
    record = read_record(store, name, expected)
    manifests = read_manifests(store, record.manifests)
    check_record(record, manifests)
    tiles = {(tile.spec.key, tile.box): tile for manifest in manifests for tile in manifest.tiles}
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
        packs={pack: size for manifest in manifests for pack, size in manifest.packs.items()},
    )


def read_record(store: Store, name: str, expected: str | None = None) -> Record:
    """Return the record of the checkpoint `name`; Corrupt when its digest is not the `expected` one."""
    try:
        data = store.get(names.record(name))
    except StoreNotFound as error:
        raise NoCheckpoint(f"store {store.url}: there is no checkpoint {name}") from error
    record = decode_record(data, names.record(name))
    if expected is not None and hexdigest(data) != expected:
        raise Corrupt(f"{names.record(name)}: is not the record the ref points to")
    return record


def read_manifests(store: Store, entries: Sequence[ManifestEntry]) -> list[RankManifest]:
    """Return the manifests of a record, in order of rank; Corrupt when one is not the one recorded."""
    with ThreadPoolExecutor(min(_READERS, len(entries)), thread_name_prefix="manifests") as pool:
        return list(pool.map(lambda entry: _read_manifest(store, entry), entries))


def _read_manifest(store: Store, entry: ManifestEntry) -> RankManifest:
    try:
        data = store.get(entry.name)
    except StoreNotFound as error:
        raise Corrupt(f"{entry.name}: is missing") from error
    if hexdigest(data) != entry.digest:
        raise Corrupt(f"{entry.name}: is not the manifest the record points to")
    return decode_manifest(data, entry.name)


def check_record(record: Record, manifests: Sequence[RankManifest]) -> None:
    """Raise FormatError when the manifests are not complete or not what the record says of them."""
    try:
        check_complete(manifests, record.save, record.world)
    except CommitRefused as error:
        raise FormatError(f"{record.name}: {error}") from error
    digest = facts_digest(record.facts)
    if digest != manifests[0].facts_digest or root(manifests, digest) != record.root:
        raise Corrupt(f"{record.name}: its root is not that of its tensors and facts")


class PackSource:
    """Tiles out of packs, by ranges; neighbours that are asked for together come in one request."""

    def __init__(self, store: Store, name: str = "store") -> None:
        self.name = name
        self._store = store
        self._ahead: dict[tuple[str, int], memoryview] = {}
        self._lock = threading.Lock()

    def fetch(self, tile: Offered) -> bytes | memoryview:
        """Return a tile's bytes; SourceError when the store does not give them."""
        pack, offset, length = tile.where["pack"], tile.where["offset"], tile.where["length"]
        with self._lock:
            ahead = self._ahead.pop((pack, offset), None)
        return self._get(pack, offset, offset + length) if ahead is None else ahead

    def prefetch(self, tiles: Sequence[Offered]) -> None:
        """Read neighbouring tiles together and keep them until they are fetched."""
        places = sorted({(t.where["pack"], t.where["offset"], t.where["length"]) for t in tiles})
        for run in _runs(places):
            if len(run) == 1:
                continue
            pack, start = run[0][0], run[0][1]
            data = memoryview(self._get(pack, start, run[-1][1] + run[-1][2]))
            with self._lock:
                for _, offset, length in run:
                    self._ahead[pack, offset] = data[offset - start : offset - start + length]

    def _get(self, pack: str, start: int, stop: int) -> bytes:
        try:
            return self._store.get(names.pack(pack), start, stop)
        except StoreError as error:
            raise SourceError(str(error)) from error


def _runs(places: Sequence[tuple[str, int, int]]) -> Iterator[list[tuple[str, int, int]]]:
    run: list[tuple[str, int, int]] = []
    for place in places:
        pack, offset, length = place
        if run and (pack != run[0][0] or offset - sum(run[-1][1:]) > _GAP or offset + length - run[0][1] > _RUN):
            yield run
            run = []
        run.append(place)
    if run:
        yield run

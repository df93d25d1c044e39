"""Checking every object of a store: packs by themselves, then each link from refs down to tiles."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from checkpointing.errors import FormatError, NewerFormat, StoreError, StoreNotFound
from checkpointing.format import names
from checkpointing.format.encoding import hexdigest
from checkpointing.format.manifest import RankManifest, StoredTile, decode_manifest
from checkpointing.format.pack import PackTile, check_tiles, read_index
from checkpointing.format.record import Record, decode_record
from checkpointing.format.refs import Ref, decode_ref
from checkpointing.format.tiles import digest
from checkpointing.reading.reader import check_record
from checkpointing.stores.protocol import Store


class Fault(StrEnum):
    """What is wrong with an object."""

    CORRUPT = "corrupt"
    MISSING = "missing"
    INCONSISTENT = "inconsistent"
    NEWER = "newer"
    UNREADABLE = "unreadable"
    UNEXPECTED = "unexpected"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is wrong in a store. `rank`, `tensor` and `pack` say where, as far as that is known.

    checkpoints: the committed ones that cannot be restored because of it.
    """

    object: str
    fault: Fault
    detail: str
    tensor: str | None = None
    box: str | None = None
    rank: int | None = None
    pack: str | None = None
    checkpoints: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a check has come, in bytes."""

    done: int
    total: int


def verify(store: Store, progress: Callable[[Progress], None] | None = None) -> Iterator[Finding]:
    """Read every byte in the store and yield what is wrong, refs and records first.

    Saves and packs that no committed checkpoint needs are read as well; that they are there is no finding. Objects
    that vanish meanwhile are not reported missing unless a committed checkpoint needs them.
    """
    yield from _Verifier(store, progress or (lambda _: None)).run()


class _Verifier:
    def __init__(self, store: Store, progress: Callable[[Progress], None]) -> None:
        self._store = store
        self._progress = progress
        self._done = 0
        self._total = 0
        self._sizes: dict[str, int] = {}
        self._refs: dict[str, Ref] = {}
        self._records: dict[str, Record] = {}
        self._manifests: dict[str, RankManifest] = {}
        self._digests: dict[str, str] = {}
        self._committed: set[str] = set()

    def run(self) -> Iterator[Finding]:
        for name in self._store.list(""):
            try:
                self._sizes[name] = self._store.size(name)
            except StoreNotFound:
                continue  # gone since it was listed
        self._total = sum(self._sizes.values())
        packs, unexpected = [], []
        for name in self._sizes:
            if names.parse_pack(name):
                packs.append(name)
            elif name.startswith(names.REFS) or names.parse_record(name) or names.parse_manifest(name):
                yield from self._document(name)
            elif not names.is_collectable(name) and name != names.SHADOW:
                unexpected.append(name)
        self._committed = {checkpoint for ref in self._refs.values() for checkpoint in ref.committed}
        yield from self._links()
        tiles = defaultdict(list)
        for manifest in self._manifests.values():
            for tile in manifest.tiles:
                tiles[tile.pack].append((manifest, tile))
        yield from self._packs_missing(tiles)
        for name in packs:
            yield from self._pack(name, tiles.get(name[-69:-5], []))
        for name in unexpected:
            self._step(self._sizes[name])
            yield Finding(object=name, fault=Fault.UNEXPECTED, detail="is no object of this format")

    def _step(self, nbytes: int) -> None:
        self._done += nbytes
        self._progress(Progress(done=self._done, total=max(self._done, self._total)))

    def _document(self, name: str) -> Iterator[Finding]:
        try:
            data = self._store.get(name)
            self._digests[name] = hexdigest(data)
            if name.startswith(names.REFS):
                self._refs[name] = decode_ref(data, name)
            elif names.parse_record(name):
                self._records[name] = decode_record(data, name)
            else:
                self._manifests[name] = decode_manifest(data, name)
        except (FormatError, StoreError) as error:
            parsed = names.parse_manifest(name)
            yield _finding(name, error, rank=parsed[1] if parsed else None)
        self._step(self._sizes[name])

    def _links(self) -> Iterator[Finding]:
        for name, ref in self._refs.items():
            for checkpoint in ref.committed:
                if names.record(checkpoint) not in self._sizes:
                    yield _missing(names.record(checkpoint), f"{name} names it", (checkpoint,))
            if ref.checkpoint is not None:
                found = self._digests.get(names.record(ref.checkpoint))
                if found is not None and found != ref.record_digest:
                    yield Finding(
                        object=names.record(ref.checkpoint),
                        fault=Fault.INCONSISTENT,
                        detail=f"is not the record {name} points to",
                        checkpoints=(ref.checkpoint,),
                    )
        for record_name, record in self._records.items():
            yield from self._record(record_name, record)

    def _record(self, name: str, record: Record) -> Iterator[Finding]:
        damaged = (record.checkpoint,) if record.checkpoint in self._committed else ()
        whole = True
        for rank, entry in enumerate(record.manifests):
            if entry.name not in self._sizes:
                whole = False
                if damaged:
                    yield _missing(entry.name, f"{name} names it", damaged, rank=rank)
            elif entry.name not in self._manifests:
                whole = False  # reported when it was read
            elif self._digests[entry.name] != entry.digest:
                whole = False
                yield Finding(
                    object=entry.name,
                    fault=Fault.INCONSISTENT,
                    detail=f"is not the manifest {name} points to",
                    rank=rank,
                    checkpoints=damaged,
                )
        if whole:
            try:
                check_record(record, [self._manifests[entry.name] for entry in record.manifests])
            except FormatError as error:
                yield Finding(object=name, fault=Fault.INCONSISTENT, detail=str(error), checkpoints=damaged)

    def _packs_missing(self, tiles: dict[str, list[tuple[RankManifest, StoredTile]]]) -> Iterator[Finding]:
        for pack, users in tiles.items():
            hit = self._hit([manifest for manifest, _ in users])
            if hit and names.pack(pack) not in self._sizes:
                manifest, tile = users[0]
                detail = f"{manifest.name} keeps {tile.spec.key} and {len(users) - 1} more tiles in it"
                yield _missing(names.pack(pack), detail, hit, rank=manifest.rank, pack=pack, tensor=tile.spec.key)

    def _hit(self, manifests: Sequence[RankManifest]) -> tuple[str, ...]:
        """Return the committed checkpoints that use any of the manifests."""
        used = {manifest.name for manifest in manifests}
        return tuple(
            sorted(
                record.checkpoint
                for record in self._records.values()
                if record.checkpoint in self._committed and any(entry.name in used for entry in record.manifests)
            )
        )

    def _pack(self, name: str, users: list[tuple[RankManifest, StoredTile]]) -> Iterator[Finding]:
        pack = name[-69:-5]
        rank = users[0][0].rank if users else None
        before = self._done
        try:
            index, size = read_index(self._store, name, pack)
        except (FormatError, StoreError) as error:
            hit = self._hit([manifest for manifest, _ in users])
            yield _finding(name, error, rank=rank, pack=pack, checkpoints=hit)
            yield from self._tiles_by_manifest(name, users)
        else:
            places = {(tile.offset, tile.length): tile for tile in index}
            for manifest, tile in users:
                there = places.get((tile.offset, tile.length))
                if there is None or (there.spec, there.box, there.digest) != (tile.spec, tile.box, tile.digest):
                    yield Finding(
                        object=manifest.name,
                        fault=Fault.INCONSISTENT,
                        detail=f"the pack's index has something else where the manifest says {tile.spec.key} lies",
                        tensor=tile.spec.key,
                        box=str(tile.box),
                        rank=manifest.rank,
                        pack=pack,
                        checkpoints=self._hit([manifest]),
                    )
            if any(manifest.packs[pack] != size for manifest, _ in users):
                yield Finding(object=name, fault=Fault.INCONSISTENT, detail=f"has {size} bytes, not as recorded")
            yield from self._tiles(name, index, users)
        self._step(max(0, self._sizes[name] - (self._done - before)))

    def _tiles(
        self, name: str, index: Sequence[PackTile], users: list[tuple[RankManifest, StoredTile]]
    ) -> Iterator[Finding]:
        try:
            for tile, good in check_tiles(self._store, name, index):
                self._step(tile.length)
                if not good:
                    holders = [m for m, t in users if t.offset == tile.offset]
                    yield _bad_tile(name, tile, holders, self._hit(holders))
        except StoreError as error:
            yield _finding(name, error, pack=name[-69:-5])

    def _tiles_by_manifest(self, name: str, users: list[tuple[RankManifest, StoredTile]]) -> Iterator[Finding]:
        """Check a pack whose index is gone, for what the manifests know of it may still be restored."""
        for manifest, tile in users:
            try:
                data = self._store.get(name, tile.offset, tile.offset + tile.length)
            except StoreError:
                return
            if len(data) != tile.length or digest(tile.spec, tile.box, data) != tile.digest:
                yield _bad_tile(name, tile, [manifest], self._hit([manifest]))


def _bad_tile(
    name: str, tile: PackTile | StoredTile, holders: Sequence[RankManifest], checkpoints: tuple[str, ...]
) -> Finding:
    return Finding(
        object=name,
        fault=Fault.CORRUPT,
        detail=f"bytes {tile.offset} to {tile.offset + tile.length} do not have their digest",
        tensor=tile.spec.key,
        box=str(tile.box),
        rank=holders[0].rank if holders else None,
        pack=name[-69:-5],
        checkpoints=checkpoints,
    )


def _missing(
    name: str,
    detail: str,
    checkpoints: tuple[str, ...],
    *,
    rank: int | None = None,
    pack: str | None = None,
    tensor: str | None = None,
) -> Finding:
    return Finding(
        object=name,
        fault=Fault.MISSING,
        detail=detail,
        rank=rank,
        pack=pack,
        tensor=tensor,
        checkpoints=checkpoints,
    )


def _finding(
    name: str,
    error: FormatError | StoreError,
    *,
    rank: int | None = None,
    pack: str | None = None,
    checkpoints: tuple[str, ...] = (),
) -> Finding:
    if isinstance(error, NewerFormat):
        fault = Fault.NEWER
    else:
        fault = Fault.CORRUPT if isinstance(error, FormatError) else Fault.UNREADABLE
    return Finding(object=name, fault=fault, detail=str(error), rank=rank, pack=pack, checkpoints=checkpoints)

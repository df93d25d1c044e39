"""What a rank does for a checkpoint: one pack and one manifest (format.md, section 9, step 1)."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from checkpointing.errors import FormatError, Inconsistent, StoreNotFound
from checkpointing.format import names
from checkpointing.format.encoding import hexdigest
from checkpointing.format.grid import cut
from checkpointing.format.manifest import (
    RankManifest,
    StoredTile,
    decode_manifest,
    encode_manifest,
    facts_digest,
    order,
)
from checkpointing.format.pack import PackPlan, check_tiles, plan_pack, read_index
from checkpointing.format.stats import Stats, statistics
from checkpointing.format.tiles import Piece, TensorSpec, digest, overlapping
from checkpointing.reading.reader import Checkpoint
from checkpointing.stores.protocol import Store, create


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedRank:
    """One rank's part of a save. bytes: of all its tiles; written: of those that were new to the store."""

    manifest: str
    manifest_digest: str
    pack: str | None
    tiles: int
    bytes: int
    written: int


def save_rank(
    store: Store,
    *,
    step: int,
    made_in: int,
    attempt: int,
    rank: int,
    world: int,
    pieces: Iterable[Piece],
    facts: dict[str, Any],
    parent: Checkpoint | None = None,
) -> SavedRank:
    """Write one rank's pieces, durably; after a failure, call it again with the same arguments.

    The pieces' bytes are read twice (digests first, for a pack's name follows from them) and never copied; they must
    not change meanwhile. Tiles that are the same in `parent` are referenced, not written. Every rank gives the same
    `facts`, one JSON object. ValueError for pieces or facts that cannot be stored; Inconsistent when this rank saved
    something else under the same step, generation and attempt.
    """
    save = names.Save(step=step, made_in=made_in, attempt=attempt)
    if not 0 <= rank < world:
        raise ValueError(f"rank {rank} is not in a world of {world}")
    common = facts_digest(facts)
    specs, tiles = _cut(pieces)
    old = {(tile.spec, tile.box): tile for tile in parent.tiles} if parent is not None else {}
    kept, fresh = [], []
    for piece, tile_digest, stats in tiles:
        known = old.get((piece.spec, piece.box))
        if known is not None and known.digest == tile_digest:
            kept.append(known)
        else:
            fresh.append((piece, tile_digest, stats))
    plan = plan_pack([(piece, tile_digest) for piece, tile_digest, _ in fresh])
    packs = {tile.pack: parent.packs[tile.pack] for tile in kept} if parent is not None else {}
    if fresh:
        packs[plan.id] = plan.size
    manifest = RankManifest(
        save=save,
        rank=rank,
        world=world,
        parent=parent.name if parent is not None else None,
        facts_digest=common,
        facts=facts if rank == 0 else None,
        packs=dict(sorted(packs.items())),
        specs=tuple(specs.values()),
        tiles=tuple(sorted([*kept, *_placed(plan, [stats for _, _, stats in fresh])], key=order)),
    )
    data = encode_manifest(manifest)
    try:
        there = store.get(manifest.name)
    except StoreNotFound:
        if fresh:
            _write_pack(store, plan)
        there = create(store, manifest.name, data)
    if there != data:
        _check_same(decode_manifest(there, manifest.name), manifest)
    return SavedRank(
        manifest=manifest.name,
        manifest_digest=hexdigest(there),
        pack=plan.id if fresh else None,
        tiles=len(manifest.tiles),
        bytes=sum(tile.length for tile in manifest.tiles),
        written=sum(tile.length for tile in plan.tiles),
    )


def _cut(pieces: Iterable[Piece]) -> tuple[dict[str, TensorSpec], list[tuple[Piece, str, Stats]]]:
    specs: dict[str, TensorSpec] = {}
    tiles = []
    for piece in pieces:
        spec = piece.spec
        if not spec.key.isprintable() or len(spec.key) > 4096:
            raise ValueError(f"{spec.key[:80]!r} cannot name a tensor: at most 4,096 printable characters")
        if specs.setdefault(spec.key, spec) != spec:
            raise ValueError(f"{spec.key} is given with two specs: {specs[spec.key]} and {spec}")
        for tile in cut(piece):
            tiles.append((tile, digest(spec, tile.box, tile.data), statistics(spec.dtype, tile.data)))
    tiles.sort(key=lambda entry: (entry[0].spec.key, entry[0].box.start))
    for key, group in itertools.groupby(tiles, key=lambda entry: entry[0].spec.key):
        shared = overlapping([tile.box for tile, _, _ in group])
        if shared is not None:
            raise ValueError(f"{key}: two pieces of one rank overlap at {shared}")
    return specs, tiles


def _placed(plan: PackPlan, stats: Iterable[Stats]) -> Iterable[StoredTile]:
    for entry, statistic in zip(plan.tiles, stats, strict=True):
        yield StoredTile(
            spec=entry.spec,
            box=entry.box,
            digest=entry.digest,
            pack=plan.id,
            offset=entry.offset,
            length=entry.length,
            codec=entry.codec,
            stats=statistic,
        )


def _write_pack(store: Store, plan: PackPlan) -> None:
    name = names.pack(plan.id)
    try:
        if store.size(name) == plan.size and _whole(store, name, plan.id):
            return
    except StoreNotFound:
        pass
    store.put(name, plan.chunks)


def _whole(store: Store, name: str, pack_id: str) -> bool:
    """Return whether a pack left by an earlier try can be used: every byte is read."""
    try:
        tiles, _ = read_index(store, name, pack_id)
    except FormatError:
        return False
    return all(good for _, good in check_tiles(store, name, tiles))


def _check_same(there: RankManifest, mine: RankManifest) -> None:
    """Accept a manifest that says the same of the same tiles, though it keeps them in other packs."""

    def contents(manifest: RankManifest) -> object:
        tiles = {(tile.spec, tile.box, tile.digest) for tile in manifest.tiles}
        return manifest.world, manifest.facts_digest, set(manifest.specs), tiles

    if contents(there) != contents(mine):
        raise Inconsistent(
            f"{mine.name}: this rank saved something else under the same step, generation and attempt; "
            "save again under a new attempt"
        )

"""A rank's part of a checkpoint: packs and one manifest (format.md, section 9, step 1)."""

from __future__ import annotations

import contextlib
import itertools
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from checkpointing.errors import Inconsistent, StoreNotFound
from checkpointing.format import names
from checkpointing.format.announcement import Role
from checkpointing.format.encoding import hexdigest
from checkpointing.format.grid import check, cut
from checkpointing.format.manifest import (
    RankManifest,
    StoredTile,
    decode_manifest,
    encode_manifest,
    facts_digest,
    order,
)
from checkpointing.format.tiles import LONGEST_KEY, Box, Piece, TensorSpec, is_key, overlapping
from checkpointing.reading.announcing import announced
from checkpointing.reading.reader import Checkpoint
from checkpointing.saving.bases import Bases, Recall
from checkpointing.saving.hashing import hashed
from checkpointing.saving.options import SaveOptions, Speeds
from checkpointing.saving.packing import Packed, Packer
from checkpointing.stores.protocol import Store, create, decides_creations

_DEFAULTS = SaveOptions()


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedRank:
    """One rank's part of a save."""

    manifest: str
    """Name of its manifest."""
    manifest_digest: str
    """BLAKE3 digest of the manifest, in hex."""
    packs: tuple[str, ...]
    """The packs of this save."""
    tiles: int
    """Tiles of this rank."""
    bytes: int
    """Bytes of all its tiles."""
    written: int
    """Bytes of the tiles that the parent did not have."""
    stored: int
    """Bytes of the packs they are in."""
    sent: int
    """Bytes of those packs that this call had to upload."""
    speeds: Speeds | None = None
    """What `auto` measured, for the next save's options."""


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
    options: SaveOptions = _DEFAULTS,
    recall: Recall | None = None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> SavedRank:
    """Write one rank's pieces, durably; after a failure, call it again with the same arguments.

    The pieces' bytes are read twice: first for digests, since a pack's name follows from them, and once more, little by
    little, into a copy that is compared with its digest and then encoded or sent. So what changes in between is in no
    checkpoint. Tiles that equal one of `parent` are referenced, not written, wherever the parent has them, and so are
    those that this rank has twice. The same pieces, parent and options give the same packs and manifest; if
    `options.codec` is "auto", the same tiles. Every rank gives the same `facts`, one JSON object. `recall(spec, box)`
    may return the bytes that the box had in the parent, or in the parent's own base, if they are still in memory, so
    that a difference to them need not read the store; they are verified. A piece that comes with its digest is a tile:
    it is not cut, it is not even read if the parent has it, and it is compared with its digest before anything is sent.

    Corrupt if a tile's bytes have changed since their digest was taken; ValueError for pieces or facts that cannot be
    stored; Inconsistent if this rank has saved something else under the same step, generation and attempt.
    """
    save = names.Save(step=step, made_in=made_in, attempt=attempt)
    if not 0 <= rank < world:
        raise ValueError(f"rank {rank} is not in a world of {world}")
    common = facts_digest(facts)
    specs, tiles = _cut(pieces, options.tile_bytes)
    if parent is not None and parent.store.url != store.url:
        raise ValueError(f"the parent is in {parent.store.url}; only tiles of the same store, {store.url}, can be kept")
    bases = Bases(parent, recall)
    write_id = "" if decides_creations(store) else secrets.token_hex(16)
    name = names.manifest(save, rank, write_id)
    if write_id:
        # Any manifest that this rank has written is as good; the commit takes one of them.
        name = next(iter(store.list(names.manifests(save, rank))), name)
    try:
        data = store.get(name)
    except StoreNotFound:
        name = names.manifest(save, rank, write_id)
        # Until the manifest is there, nothing else shows a collection that these packs are needed.
        with announced(store, Role.WRITER, bases.name, after=options.announce_after):
            packed = _pack(store, tiles, bases, options, clock, sleep)
            manifest = RankManifest(
                save=save,
                rank=rank,
                world=world,
                parent=bases.name,
                facts_digest=common,
                facts=facts if rank == 0 else None,
                packs=packed.packs,
                specs=tuple(specs.values()),
                tiles=tuple(sorted(packed.tiles, key=order)),
                write_id=write_id,
            )
            mine = encode_manifest(manifest)
            data = create(store, name, mine)
        if data != mine:
            there = decode_manifest(data, name)
            _check_same(there, world, common, specs, {_contents(tile) for tile in manifest.tiles})
            manifest = there
        return _saved(manifest, data, parent, sent=packed.sent, speeds=packed.speeds)
    manifest = decode_manifest(data, name)
    with contextlib.closing(hashed(tiles, bases, options.workers)) as hashed_tiles:
        _check_same(manifest, world, common, specs, {(t.piece.spec, t.piece.box, t.digest) for t in hashed_tiles})
    return _saved(manifest, data, parent, sent=0, speeds=options.speeds)


def _pack(
    store: Store,
    tiles: Sequence[Piece],
    bases: Bases,
    options: SaveOptions,
    clock: Callable[[], float],
    sleep: Callable[[float], None],
) -> Packed:
    with (
        Packer(store, bases, options, tiles=tiles, clock=clock, sleep=sleep) as packer,
        contextlib.closing(hashed(tiles, bases, options.workers)) as hashed_tiles,
    ):
        for tile in hashed_tiles:
            packer.add(tile)
        return packer.finish()


def _cut(pieces: Iterable[Piece], tile_bytes: int) -> tuple[dict[str, TensorSpec], list[Piece]]:
    specs: dict[str, TensorSpec] = {}
    tiles: list[Piece] = []
    for piece in pieces:
        spec = piece.spec
        if not is_key(spec.key):
            raise ValueError(f"{spec.key[:80]!r} cannot name a tensor: at most {LONGEST_KEY:,} printable characters")
        if specs.setdefault(spec.key, spec) != spec:
            raise ValueError(f"{spec.key} is given with two specs: {specs[spec.key]} and {spec}")
        if piece.digest:
            check(piece)
            tiles.append(piece)
        else:
            tiles.extend(cut(piece, tile_bytes))
    tiles.sort(key=lambda tile: (tile.spec.key, tile.box.start))
    for key, group in itertools.groupby(tiles, key=lambda tile: tile.spec.key):
        shared = overlapping([tile.box for tile in group])
        if shared is not None:
            raise ValueError(f"{key}: two pieces of one rank overlap at {shared}")
    return specs, tiles


def _saved(
    manifest: RankManifest, data: bytes, parent: Checkpoint | None, *, sent: int, speeds: Speeds | None
) -> SavedRank:
    packs = {pack: size for pack, size in manifest.packs.items() if parent is None or pack not in parent.packs}
    fresh = {(tile.pack, tile.offset): tile.nbytes for tile in manifest.tiles if tile.pack in packs}
    return SavedRank(
        manifest=manifest.name,
        manifest_digest=hexdigest(data),
        packs=tuple(packs),
        tiles=len(manifest.tiles),
        bytes=sum(tile.nbytes for tile in manifest.tiles),
        written=sum(fresh.values()),
        stored=sum(packs.values()),
        sent=sent,
        speeds=speeds,
    )


_Contents = tuple[TensorSpec, Box, str]


def _contents(tile: StoredTile) -> _Contents:
    return tile.spec, tile.box, tile.digest


def _check_same(
    there: RankManifest, world: int, common: str, specs: dict[str, TensorSpec], tiles: set[_Contents]
) -> None:
    """Accept a manifest that says the same about the same tiles, even if it has them in other packs."""
    same = there.world == world and there.facts_digest == common and set(there.specs) == set(specs.values())
    if not same or {_contents(tile) for tile in there.tiles} != tiles:
        raise Inconsistent(
            f"{there.name}: this rank saved something else under the same step, generation and attempt; "
            "save again under a new attempt"
        )

"""The space that checkpoints take in the store: alone, and together with others that refer to the same tiles."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from checkpointing.format import names
from checkpointing.inspection.documents import CheckpointDocuments, Extent, extents
from checkpointing.stores.protocol import Entry


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """One checkpoint, in bytes. size: of its tensors. stored: stored bytes of the tiles that it refers to.

    unique: the part of `stored` that no other checkpoint refers to; shared: the rest. frees: packs and documents that
    nothing else would need if it were collected; less than `unique` if a pack holds tiles of others too.
    """

    checkpoint: str
    step: int
    size: int
    stored: int
    unique: int
    shared: int
    frees: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreUsage:
    """A whole store, in bytes of its objects. unreferenced: packs that no checkpoint needs: garbage, or a new save.

    missing: the number of packs that a checkpoint needs and the store does not list.
    """

    checkpoints: tuple[Usage, ...]
    objects: int
    packs: int
    documents: int
    unreferenced: int
    unreferenced_packs: int
    other: int
    missing: int


def usage(checkpoints: Sequence[CheckpointDocuments], listing: Iterable[Entry]) -> StoreUsage:
    """Return what each checkpoint takes in addition to the others, and the rest of the store by its listing."""
    sizes = {entry.name: entry.size for entry in listing}
    uses = [_uses(one) for one in checkpoints]
    extent_users = Counter(extent for own in uses for extent in own)
    pack_users = Counter(pack for one in checkpoints for pack in one.packs)
    # A later checkpoint of the same save shares its manifests.
    manifest_users = Counter(entry.name for one in checkpoints for entry in one.record.manifests)
    rows = []
    for one, own in zip(checkpoints, uses, strict=True):
        stored = sum(extent.length for extent in own)
        unique = sum(extent.length for extent in own if extent_users[extent] == 1)
        packs = sum(size for pack, size in one.packs.items() if pack_users[pack] == 1)
        documents = sum(entry.size for entry in one.record.manifests if manifest_users[entry.name] == 1)
        rows.append(
            Usage(
                checkpoint=one.name,
                step=one.record.save.step,
                size=one.nbytes,
                stored=stored,
                unique=unique,
                shared=stored - unique,
                frees=packs + documents + sizes.get(one.record.name, 0),
            )
        )
    packs_there = {pack: size for name, size in sizes.items() if (pack := names.parse_pack(name)) is not None}
    documents = sum(size for name, size in sizes.items() if _is_document(name))
    idle = [pack for pack in packs_there if pack not in pack_users]
    packed = sum(packs_there.values())
    return StoreUsage(
        checkpoints=tuple(rows),
        objects=len(sizes),
        packs=packed,
        documents=documents,
        unreferenced=sum(packs_there[pack] for pack in idle),
        unreferenced_packs=len(idle),
        other=sum(sizes.values()) - packed - documents,
        missing=sum(pack not in packs_there for pack in pack_users),
    )


def _uses(one: CheckpointDocuments) -> set[Extent]:
    return {extent for tile in one.tiles for extent in extents(tile)}


def _is_document(name: str) -> bool:
    refs = name.startswith(names.REFS) or name == names.SHADOW
    kept = names.is_history(name) or names.is_tombstone(name)
    return refs or kept or names.parse_record(name) is not None or names.parse_manifest(name) is not None

"""The space that checkpoints take in the store: alone, and together with others that refer to the same tiles."""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from checkpointing.format import names
from checkpointing.format.record import Record
from checkpointing.inspection.documents import CheckpointDocuments, extents
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


def usage(checkpoints: Iterable[CheckpointDocuments], listing: Iterable[Entry]) -> StoreUsage:
    """Return what each checkpoint takes in addition to the others, and the rest of the store by its listing.

    The checkpoints are taken one after another, before the listing. Some 16 bytes are kept of each tile: the manifests
    of a long run do not fit in memory together.
    """
    uses = [_Use.of(one) for one in checkpoints]
    sizes = {entry.name: entry.size for entry in listing}
    uniques = _uniques([one.extents for one in uses])
    pack_users = Counter(pack for one in uses for pack in one.packs)
    # A later checkpoint of the same save shares its manifests.
    manifest_users = Counter(entry.name for one in uses for entry in one.record.manifests)
    rows = []
    for one, unique in zip(uses, uniques, strict=True):
        stored = sum(sum(lengths) for lengths in (numbers[1::2] for numbers in one.extents.values()))
        packs = sum(size for pack, size in one.packs.items() if pack_users[pack] == 1)
        documents = sum(entry.size for entry in one.record.manifests if manifest_users[entry.name] == 1)
        rows.append(
            Usage(
                checkpoint=one.record.checkpoint,
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Use:
    """What is kept of a checkpoint. extents: offset, length, offset, ... of its extents, distinct, by their packs."""

    record: Record
    nbytes: int
    packs: Mapping[str, int]
    extents: Mapping[str, array[int]]

    @classmethod
    def of(cls, documents: CheckpointDocuments) -> _Use:
        by_pack: dict[str, array[int]] = defaultdict(lambda: array("Q"))
        for extent in {extent for tile in documents.tiles for extent in extents(tile)}:
            by_pack[extent.pack].extend((extent.offset, extent.length))
        return cls(record=documents.record, nbytes=documents.nbytes, packs=documents.packs, extents=by_pack)


def _uniques(uses: Sequence[Mapping[str, array[int]]]) -> list[int]:
    """Return the bytes of each one's extents that no other has."""
    unique = [0] * len(uses)
    users_by_pack: dict[str, list[int]] = defaultdict(list)
    for number, one in enumerate(uses):
        for pack in one:
            users_by_pack[pack].append(number)
    for pack, users in users_by_pack.items():
        counts = Counter(extent for number in users for extent in _pairs(uses[number][pack]))
        for number in users:
            unique[number] += sum(length for at, length in _pairs(uses[number][pack]) if counts[at, length] == 1)
    return unique


def _pairs(numbers: array[int]) -> Iterator[tuple[int, int]]:
    return zip(numbers[::2], numbers[1::2], strict=True)


def _is_document(name: str) -> bool:
    refs = name.startswith(names.REFS) or name == names.SHADOW
    kept = names.is_history(name) or names.is_tombstone(name)
    return refs or kept or names.parse_record(name) is not None or names.parse_manifest(name) is not None

"""Checkpoint records: one save, complete, and the root that names its contents (format.md, section 7)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import blake3

from checkpointing.format import names
from checkpointing.format.encoding import canonical, document, parse
from checkpointing.format.fields import Fields
from checkpointing.format.manifest import RankManifest, facts_digest
from checkpointing.format.tiles import Box, TensorSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestEntry:
    """One rank manifest of a checkpoint, by name, digest and size of its object."""

    name: str
    digest: str
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """The contents of a checkpoint in numbers: tensors, distinct tiles, and their bytes as they are in memory."""

    tensors: int
    tiles: int
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A save as committed in one generation."""

    save: names.Save
    committed_in: int
    world: int
    root: str
    facts: dict[str, Any]
    manifests: tuple[ManifestEntry, ...]
    totals: Totals
    write_id: str

    @property
    def checkpoint(self) -> str:
        """The checkpoint's name."""
        return names.checkpoint(self.save, self.committed_in)

    @property
    def name(self) -> str:
        """The name of its object."""
        return names.record(self.checkpoint)


def make_record(
    manifests: Sequence[RankManifest], entries: Sequence[ManifestEntry], *, committed_in: int, write_id: str
) -> Record:
    """Return the record of complete manifests in order of rank, each with its object's entry."""
    first = manifests[0]
    assert first.facts is not None, "completeness was checked"
    boxes = {(tile.spec.key, tile.box): tile.nbytes for manifest in manifests for tile in manifest.tiles}
    return Record(
        save=first.save,
        committed_in=committed_in,
        world=first.world,
        root=root(manifests, facts_digest(first.facts)),
        facts=first.facts,
        manifests=tuple(entries),
        totals=Totals(
            tensors=len({spec.key for manifest in manifests for spec in manifest.specs}),
            tiles=len(boxes),
            bytes=sum(boxes.values()),
        ),
        write_id=write_id,
    )


def root(manifests: Iterable[RankManifest], facts: str) -> str:
    """Return the Merkle root over tiles, empty tensors and the digest of the facts."""
    leaves = {canonical(["facts", facts])}
    heads: dict[TensorSpec, bytes] = {}
    for manifest in manifests:
        for tile in manifest.tiles:
            head = heads.get(tile.spec)
            if head is None:
                head = heads[tile.spec] = canonical([tile.spec.key, tile.spec.dtype, tile.spec.shape])[:-1]
            leaves.add(_leaf(head, tile.box, tile.digest))
        leaves.update(canonical([s.key, s.dtype, s.shape]) for s in manifest.specs if not s.box.numel)
    level = [blake3.blake3(b"\x00" + leaf).digest() for leaf in sorted(leaves)]
    while len(level) > 1:
        paired = [
            blake3.blake3(b"\x01" + left + right).digest() for left, right in zip(level[::2], level[1::2], strict=False)
        ]
        level = paired + (level[-1:] if len(level) % 2 else [])
    return level[0].hex()


def _leaf(head: bytes, box: Box, digest: str) -> bytes:
    """Return the canonical JSON of [key, dtype, shape, start, stop, digest]. head: its beginning."""
    start, stop = ",".join(map(str, box.start)), ",".join(map(str, box.stop))
    return b'%s,[%s],[%s],"%s"]' % (head, start.encode(), stop.encode(), digest.encode())


def encode_record(record: Record) -> bytes:
    """Return the record's object; the same record gives the same bytes."""
    return document(
        "checkpoint",
        {
            "write_id": record.write_id,
            "step": record.save.step,
            "made_in": record.save.made_in,
            "attempt": record.save.attempt,
            "committed_in": record.committed_in,
            "world": record.world,
            "root": record.root,
            "facts": record.facts,
            "manifests": [dataclasses.asdict(entry) for entry in record.manifests],
            "totals": dataclasses.asdict(record.totals),
        },
    )


def decode_record(data: bytes, name: str) -> Record:
    """Return the record in the object `name`; FormatError for anything that format.md forbids."""
    fields = Fields(parse(data, "checkpoint", name), name)
    save = names.Save(step=fields.integer("step"), made_in=fields.integer("made_in"), attempt=fields.integer("attempt"))
    entries = []
    for rank, item in enumerate(fields.items("manifests")):
        entry = Fields(item, name)
        if names.parse_manifest(entry.raw("name")) != (save, rank):
            raise entry.fail(f"manifest {rank} is not named {names.manifest(save, rank)}")
        entries.append(
            ManifestEntry(name=entry.text("name"), digest=entry.digest("digest"), size=entry.integer("size"))
        )
    facts = fields.raw("facts")
    if not isinstance(facts, dict):
        raise fields.fail("facts are not an object")
    try:
        facts_digest(facts)
    except ValueError as error:
        raise fields.fail(str(error)) from error
    totals = Fields(fields.raw("totals"), name)
    record = Record(
        save=save,
        committed_in=fields.integer("committed_in"),
        world=fields.integer("world"),
        root=fields.digest("root"),
        facts=facts,
        manifests=tuple(entries),
        totals=Totals(tensors=totals.integer("tensors"), tiles=totals.integer("tiles"), bytes=totals.integer("bytes")),
        write_id=fields.text("write_id"),
    )
    if record.name != name or record.world != len(entries) or not entries:
        raise fields.fail(f"says it is {record.name} of {record.world} ranks, with {len(entries)} manifests")
    return record

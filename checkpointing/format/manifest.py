"""Rank manifests: what one rank saved, and in which packs (format.md, section 6)."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from checkpointing.format import names
from checkpointing.format.codecs import Codec, fits
from checkpointing.format.encoding import canonical, document, hexdigest, parse
from checkpointing.format.fields import Fields
from checkpointing.format.pack import HEAD, TAIL
from checkpointing.format.stats import Stats
from checkpointing.format.tiles import Box, TensorSpec, overlapping


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """The older tile that a difference refers to: of the same dtype and box, `length` bytes from `offset` of a pack.

    codec: never XOR_PLANES, so that no tile needs more than two reads.
    """

    digest: str
    pack: str
    offset: int
    length: int
    codec: Codec = Codec.RAW
    check: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTile:
    """One tile and where its bytes are: `length` stored bytes from `offset` of a pack.

    digest: of the tile itself. check: digest of the stored bytes, "" for RAW, which has the same. base: for XOR_PLANES.
    """

    spec: TensorSpec
    box: Box
    digest: str
    pack: str
    offset: int
    length: int
    codec: Codec = Codec.RAW
    check: str = ""
    base: Base | None = None
    stats: Stats = None

    @property
    def nbytes(self) -> int:
        """Bytes of the tile itself."""
        return self.box.numel * self.spec.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class RankManifest:
    """What one rank saved. `packs` maps pack ids to sizes; `facts` is None on every rank but 0.

    `specs` holds every tensor of the rank, even those of which it has no element. write_id: the one in its name, if the
    rank may have written several.
    """

    save: names.Save
    rank: int
    world: int
    parent: str | None
    facts_digest: str
    facts: dict[str, Any] | None
    packs: dict[str, int]
    specs: tuple[TensorSpec, ...]
    tiles: tuple[StoredTile, ...]
    write_id: str = ""

    @property
    def name(self) -> str:
        """The name of its object."""
        return names.manifest(self.save, self.rank, self.write_id)


def order(tile: StoredTile) -> tuple[str, tuple[int, ...]]:
    """Sort tiles by key, then by start."""
    return tile.spec.key, tile.box.start


def facts_digest(facts: dict[str, Any]) -> str:
    """Return the digest by which ranks agree on facts; ValueError if JSON cannot hold them as they are."""
    check_facts(facts, "facts")
    try:
        return hexdigest(canonical(facts))
    except (ValueError, TypeError) as error:
        raise ValueError(f"facts cannot be written as JSON: {error}") from error


def check_facts(value: object, where: str, depth: int = 0) -> None:
    """Raise ValueError for keys that JSON would silently turn into text, and for more than 64 levels."""
    if depth > 64:
        raise ValueError(f"{where:.80}... has more than 64 levels")
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise ValueError(f"{where} has the key {key!r}; JSON has text keys only")
            check_facts(item, f"{where}[{key!r}]", depth + 1)
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            check_facts(item, f"{where}[{number}]", depth + 1)


def encode_manifest(manifest: RankManifest) -> bytes:
    """Return the manifest's object; the same manifest gives the same bytes."""
    places = {pack: place for place, pack in enumerate(manifest.packs)}
    tiles = {key: list(group) for key, group in itertools.groupby(sorted(manifest.tiles, key=order), _key)}
    return document(
        "rank",
        {
            "step": manifest.save.step,
            "made_in": manifest.save.made_in,
            "attempt": manifest.save.attempt,
            "rank": manifest.rank,
            "world": manifest.world,
            "parent": manifest.parent,
            "facts_digest": manifest.facts_digest,
            "facts": manifest.facts,
            "packs": [{"id": pack, "size": size} for pack, size in manifest.packs.items()],
            "tensors": [
                {
                    "key": spec.key,
                    "dtype": spec.dtype,
                    "shape": spec.shape,
                    "tiles": [
                        {
                            "start": tile.box.start,
                            "stop": tile.box.stop,
                            "digest": tile.digest,
                            "pack": places[tile.pack],
                            "offset": tile.offset,
                            "length": tile.length,
                            "codec": tile.codec,
                            "stats": tile.stats,
                            **_encoding(tile, places),
                        }
                        for tile in tiles.get(spec.key, ())
                    ],
                }
                for spec in sorted(manifest.specs, key=attrgetter("key"))
            ],
        },
    )


def _encoding(tile: StoredTile, places: dict[str, int]) -> dict[str, Any]:
    """Return the fields that only encoded tiles have."""
    if tile.codec is Codec.RAW:
        return {}
    if tile.base is None:
        return {"check": tile.check}
    base = tile.base
    where = {"digest": base.digest, "pack": places[base.pack], "offset": base.offset, "length": base.length}
    check = {"check": base.check} if base.codec is not Codec.RAW else {}
    return {"check": tile.check, "base": {**where, "codec": base.codec, **check}}


def _key(tile: StoredTile) -> str:
    return tile.spec.key


def decode_manifest(data: bytes, name: str) -> RankManifest:
    """Return the manifest in the object `name`; FormatError for anything that format.md forbids."""
    fields = Fields(parse(data, "rank", name), name)
    save = names.Save(step=fields.integer("step"), made_in=fields.integer("made_in"), attempt=fields.integer("attempt"))
    packs = _packs(fields, name)
    specs, tiles = [], []
    for item in fields.items("tensors"):
        tensor = Fields(item, name)
        spec = tensor.spec()
        specs.append(spec)
        own = [_tile(Fields(entry, name), spec, packs) for entry in tensor.items("tiles")]
        shared = overlapping([tile.box for tile in own])
        if shared is not None:
            raise fields.fail(f"{spec.key}: two tiles overlap at {shared}")
        tiles.extend(own)
    if len({spec.key for spec in specs}) != len(specs):
        raise fields.fail("names a tensor twice")
    manifest = RankManifest(
        save=save,
        rank=fields.integer("rank"),
        world=fields.integer("world"),
        parent=_parent(fields),
        facts_digest=fields.digest("facts_digest"),
        facts=_facts(fields),
        packs=dict(packs),
        specs=tuple(specs),
        tiles=tuple(tiles),
        write_id=names.manifest_write_id(name),
    )
    if manifest.name != name or manifest.rank >= manifest.world:
        raise fields.fail(f"says it is {manifest.name} of {manifest.world} ranks")
    return manifest


def _packs(fields: Fields, name: str) -> list[tuple[str, int]]:
    packs = []
    for item in fields.items("packs"):
        entry = Fields(item, name)
        packs.append((entry.digest("id"), entry.integer("size")))
    if len(dict(packs)) != len(packs):
        raise fields.fail("names a pack twice")
    return packs


def _tile(fields: Fields, spec: TensorSpec, packs: list[tuple[str, int]]) -> StoredTile:
    box = fields.box(spec)
    nbytes = box.numel * spec.itemsize
    own = _where(fields, spec, box, nbytes, packs)
    base = None
    if own.codec is Codec.XOR_PLANES:
        base = _where(fields.inner("base", "base of"), spec, box, nbytes, packs)
        if base.codec is Codec.XOR_PLANES:
            raise fields.fail(f"{spec.key} {box}: its base is itself a difference")
    return StoredTile(
        spec=spec,
        box=box,
        digest=own.digest,
        pack=own.pack,
        offset=own.offset,
        length=own.length,
        codec=own.codec,
        check=own.check,
        base=base,
        stats=_stats(fields),
    )


def _where(fields: Fields, spec: TensorSpec, box: Box, nbytes: int, packs: list[tuple[str, int]]) -> Base:
    """Return where the `nbytes` bytes of a tile are stored."""
    place, codec = fields.integer("pack"), fields.codec()
    if place >= len(packs):
        raise fields.fail(f"{spec.key} {box}: names pack {place} of {len(packs)}")
    base = Base(
        digest=fields.digest("digest"),
        pack=packs[place][0],
        offset=fields.integer("offset"),
        length=fields.integer("length"),
        codec=codec,
        check="" if codec is Codec.RAW else fields.digest("check"),
    )
    if not fits(codec, base.length, nbytes):
        raise fields.fail(f"{spec.key} {box}: {base.length} stored bytes are not those of its box")
    if base.offset < len(HEAD) or base.offset + base.length > packs[place][1] - TAIL:
        raise fields.fail(f"{spec.key} {box}: lies outside its pack")
    return base


def _stats(fields: Fields) -> Stats:
    value = fields.raw("stats")
    if value is None:
        return None
    fine = isinstance(value, list) and len(value) == 4
    for number in value if fine else ():
        known = type(number) in (int, float) and abs(number) < math.inf
        if not known and number is not None and number not in ("inf", "-inf"):
            fine = False
    if not fine:
        raise fields.fail("stats are not four numbers")
    return list(value)


def _parent(fields: Fields) -> str | None:
    value = fields.raw("parent")
    if value is not None and names.parse_checkpoint(value) is None:
        raise fields.fail("parent is not the name of a checkpoint")
    return None if value is None else str(value)


def _facts(fields: Fields) -> dict[str, Any] | None:
    value = fields.raw("facts")
    if value is None:
        return None
    try:
        if isinstance(value, dict) and hexdigest(canonical(value)) == fields.digest("facts_digest"):
            return value
    except ValueError as error:
        raise fields.fail(f"facts: {error}") from error
    raise fields.fail("its facts do not match their digest")

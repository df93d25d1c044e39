"""Tombstones: what a sweep will delete (format.md, section 13)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from checkpointing.format import names
from checkpointing.format.encoding import document, parse
from checkpointing.format.fields import Fields


@dataclass(frozen=True, slots=True, kw_only=True)
class Doomed:
    """An object that a sweep will delete, and its bytes."""

    name: str
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tombstone:
    """What one sweep will delete, in this order. grace: seconds by the store's clock to wait first."""

    grace: float
    objects: tuple[Doomed, ...]


def encode_tombstone(tombstone: Tombstone) -> bytes:
    """Return the tombstone's object."""
    return document("tombstone", dataclasses.asdict(tombstone))


def decode_tombstone(data: bytes, name: str) -> Tombstone:
    """Return the tombstone in the object `name`; FormatError for anything that format.md forbids."""
    fields = Fields(parse(data, "tombstone", name), name)
    grace = fields.raw("grace")
    if isinstance(grace, bool) or not isinstance(grace, int | float) or grace < 0:
        raise fields.fail(f"grace is {grace!r:.40}, not a number of seconds")
    objects = []
    for item in fields.items("objects"):
        entry = Fields(item, name)
        doomed = Doomed(name=entry.text("name"), size=entry.integer("size"))
        if not names.is_collectable(doomed.name):
            raise fields.fail(f"{doomed.name!r:.80} is nothing that is ever collected")
        objects.append(doomed)
    return Tombstone(grace=float(grace), objects=tuple(objects))

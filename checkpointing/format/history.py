"""Parts of the history: lists of checkpoints that no longer fit into the ref (format.md, section 8)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from checkpointing.format import names
from checkpointing.format.encoding import document, parse
from checkpointing.format.fields import Fields
from checkpointing.format.refs import Older, decode_older


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """Committed checkpoints, newest first, and a link to the older ones."""

    checkpoints: tuple[str, ...]
    older: Older | None


def encode_history(history: History) -> bytes:
    """Return the part's object."""
    return document("history", dataclasses.asdict(history))


def decode_history(data: bytes, name: str) -> History:
    """Return the part in the object `name`; FormatError for anything that format.md forbids."""
    fields = Fields(parse(data, "history", name), name)
    checkpoints = fields.items("checkpoints")
    if any(names.parse_checkpoint(item) is None for item in checkpoints):
        raise fields.fail("names something that is no checkpoint")
    return History(checkpoints=tuple(checkpoints), older=decode_older(fields.raw("older"), name))

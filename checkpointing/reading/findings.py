"""The faults that a store can have."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from checkpointing.errors import FormatError, NewerFormat, StoreError


class Fault(StrEnum):
    """A kind of fault of an object."""

    CORRUPT = "corrupt"
    MISSING = "missing"
    INCONSISTENT = "inconsistent"
    NEWER = "newer"
    UNREADABLE = "unreadable"
    UNEXPECTED = "unexpected"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One fault in a store."""

    object: str
    """Key of the object."""
    fault: Fault
    """The kind of fault."""
    detail: str
    """Details, for people."""
    tensor: str | None = None
    """The tensor whose bytes are affected, as far as that is known."""
    box: str | None = None
    """The part of the tensor."""
    rank: int | None = None
    """The rank whose part of the save it is."""
    pack: str | None = None
    """Id of the pack."""
    checkpoints: tuple[str, ...] = ()
    """Committed checkpoints that cannot be restored because of it, unless another copy of the tile is found."""


def from_error(
    name: str,
    error: FormatError | StoreError,
    *,
    rank: int | None = None,
    pack: str | None = None,
    checkpoints: tuple[str, ...] = (),
) -> Finding:
    """Return the finding that the object `name` could not be read."""
    if isinstance(error, NewerFormat):
        fault = Fault.NEWER
    else:
        fault = Fault.CORRUPT if isinstance(error, FormatError) else Fault.UNREADABLE
    return Finding(object=name, fault=fault, detail=str(error), rank=rank, pack=pack, checkpoints=checkpoints)

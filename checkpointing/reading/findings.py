"""What can be wrong in a store."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from checkpointing.errors import FormatError, NewerFormat, StoreError


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

    checkpoints: the committed ones that cannot be restored because of it, unless another copy of the tile is found.
    """

    object: str
    fault: Fault
    detail: str
    tensor: str | None = None
    box: str | None = None
    rank: int | None = None
    pack: str | None = None
    checkpoints: tuple[str, ...] = ()


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

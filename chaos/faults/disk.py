"""Faults of a file system: it never answers."""

from __future__ import annotations

from dataclasses import dataclass

from chaos.faults.code import NAMED, STUCK
from chaos.faults.fault import Ends, Need, Place
from chaos.faults.script import InScript, about

_FUSE = frozenset({Need.FUSE})


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocked(InScript):
    """A rank reads a file whose bytes never come, in state D."""

    WORD = "blocked"
    ABOUT = about(Place.DISK, "a FUSE file system", NAMED, STUCK, "rank.stuck", 5.0, _FUSE, ends=Ends.NODE)


KINDS = (Blocked,)

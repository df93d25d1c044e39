"""Faults of memory: bits change in it, and it runs out."""

from __future__ import annotations

from dataclasses import dataclass

from chaos.faults.fault import Place
from chaos.faults.script import InScript, about


@dataclass(frozen=True, slots=True, kw_only=True)
class Rest(InScript):
    """One bit of a rank's first parameter changes in its memory."""

    WORD = "rest"
    ABOUT = about(
        Place.MEMORY,
        "a write to the parameter",
        "its step is not made, and all go on from the newest snapshot",
        "a bit of a rank's parameters or optimizer state changes in its memory",
        "state.altered",
        5.0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Short(InScript):
    """A rank asks for more memory than the kernel lets it have."""

    WORD = "memory"
    ABOUT = about(
        Place.MEMORY,
        "the limit `RLIMIT_DATA` of the process",
        "the next generation needs less, with the same bits",
        "memory runs out on a rank, on a device or on the host, also where the kernel kills it for that",
        "memory.short",
        5.0,
    )


KINDS = (Rest, Short)

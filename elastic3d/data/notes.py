"""What those who make samples have to say, and the bytes that they read, on their way to the trainer's log.

Samples are often made in a loader's process. That was forked from a trainer with threads, and must use neither its log
nor its connection to its keeper: so what is said there travels with the samples.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

from torch.utils.data import get_worker_info

from elastic3d import source_waits
from elastic3d.log import process_log


@dataclass(frozen=True, slots=True, kw_only=True)
class Uncached:
    """No more samples are kept in this folder."""

    folder: str
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Remade:
    """A sample's file in this folder was damaged, and the sample was made again."""

    folder: str
    sample: str
    error: str


Note = Uncached | Remade


@dataclass(slots=True, kw_only=True)
class _Collected:
    """What was said and read in this process and not taken yet. carried: its samples take the notes along."""

    notes: list[Note]
    nbytes: int = 0
    carried: bool = False


_collected = _Collected(notes=[])


def note(one: Note) -> None:
    """Have the trainer log something, or do so at once where this is no loader's process."""
    if _collected.carried:
        _collected.notes.append(one)
    elif get_worker_info() is None:
        log([one])
    else:
        warnings.warn(_words(one), stacklevel=3)


def read(nbytes: int) -> None:
    """Count bytes that a sample was made of, read from where reading takes time."""
    _collected.nbytes += nbytes


def carry(worker: int) -> None:
    """Begin a loader's process, of this number: what is said in it is kept for those who call `said`."""
    _collected.notes, _collected.nbytes, _collected.carried = [], 0, True
    source_waits.take_place(worker)


def said() -> list[Note]:
    """Return what was said in this loader's process since the last call."""
    notes, _collected.notes = _collected.notes, []
    return notes


def bytes_read() -> int:
    """Return the bytes that were read in this process since the last call."""
    nbytes, _collected.nbytes = _collected.nbytes, 0
    return nbytes


def log(notes: Sequence[Note]) -> None:
    """Log what was said."""
    for one in notes:
        if isinstance(one, Uncached):
            process_log().emit("samples.uncached", folder=one.folder, detail=one.detail)
        else:
            process_log().emit("sample.remade", folder=one.folder, sample=one.sample, error=one.error)


def _words(one: Note) -> str:
    if isinstance(one, Uncached):
        return f"Cached: not all samples are kept in {one.folder}: {one.detail}"
    return f"Cached: {one.sample} was damaged in {one.folder}, and was made again: {one.error}"

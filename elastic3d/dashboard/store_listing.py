"""The checkpoints of a store with their lineage, read a few at a time, and what changed between two of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from checkpointing import Store
from checkpointing.errors import CheckpointError
from checkpointing.inspection.difference import Difference, difference
from checkpointing.inspection.documents import find
from checkpointing.reading import naming
from checkpointing.reading.reader import read_manifests, read_record
from elastic3d.cli.ckpt.naming import choose, labels_of

SHOWN = 40
"""Checkpoints that are listed, the newest."""

AT_ONCE = 8
"""Most of them whose documents are read in one look: a page has those that are there, while others are to come."""

COMPARED = 8
"""Comparisons that are kept: checkpoints do not change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredCheckpoint:
    """A committed checkpoint. labels: what points to it, such as "verified". read: whether its documents were.

    made_in, committed_in: generations. parent: the checkpoint from which it took what did not change, None for none.
    error: why its documents cannot be read, "" if they can.
    """

    checkpoint: str
    labels: tuple[str, ...] = ()
    read: bool = False
    step: int = 0
    made_in: int = 0
    committed_in: int = 0
    ranks: int = 0
    tensors: int = 0
    bytes: int = 0
    parent: str | None = None
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreListing:
    """The newest checkpoints, newest first. more: there are older ones. generation: the newest that may commit."""

    generation: int | None
    checkpoints: tuple[StoredCheckpoint, ...] = ()
    more: bool = False

    @property
    def complete(self) -> bool:
        """Whether the documents of all were read."""
        return all(one.read for one in self.checkpoints)


class StoreLister:
    """Reads a store, and keeps what does not change. open: returns the store, and is called until it does."""

    def __init__(self, open: Callable[[], Store]) -> None:
        self._open = open
        self._store: Store | None = None
        self._known: dict[str, StoredCheckpoint] = {}
        self._compared: dict[tuple[str, str], Difference] = {}

    def look(self) -> StoreListing:
        """Return what the store lists, with the documents of `AT_ONCE` more; CheckpointError or OSError."""
        store = self._opened()
        ref = naming.read_ref(store)
        if ref is None:
            return StoreListing(generation=None)
        names = ref.committed[:SHOWN]
        labels = labels_of(ref, names)
        self._known = {name: self._known[name] for name in names if name in self._known}
        for name in [name for name in names if name not in self._known][:AT_ONCE]:
            self._known[name] = _read(store, name)
        return StoreListing(
            generation=ref.generation,
            checkpoints=tuple(
                _labelled(self._known.get(name, StoredCheckpoint(checkpoint=name)), labels.get(name, ()))
                for name in names
            ),
            more=len(ref.committed) > SHOWN or ref.older is not None,
        )

    def difference(self, before: str, after: str) -> Difference:
        """Return what changed between two checkpoints, by any of their names; CheckpointError or OSError."""
        store = self._opened()
        old, new = choose(store, before), choose(store, after)
        key = old.name, new.name
        if key not in self._compared:
            kept = list(self._compared.items())[-COMPARED + 1 :]
            documents = [find(store, one.name, expected=one.expected) for one in (old, new)]
            self._compared = dict([*kept, (key, difference(*documents))])
        return self._compared[key]

    def _opened(self) -> Store:
        if self._store is None:
            self._store = self._open()
        return self._store


def _read(store: Store, name: str) -> StoredCheckpoint:
    """Return a checkpoint by its record and its first manifest, which has the parent; or what is wrong with it."""
    try:
        record = read_record(store, name)
        (first,) = read_manifests(store, record.manifests[:1])
    except CheckpointError as error:
        return StoredCheckpoint(checkpoint=name, read=True, error=" ".join(str(error).split()))
    return StoredCheckpoint(
        checkpoint=name,
        read=True,
        step=record.save.step,
        made_in=record.save.made_in,
        committed_in=record.committed_in,
        ranks=record.world,
        tensors=record.totals.tensors,
        bytes=record.totals.bytes,
        parent=first.parent,
    )


def _labelled(one: StoredCheckpoint, labels: tuple[str, ...]) -> StoredCheckpoint:
    return one if one.labels == labels else replace(one, labels=labels)

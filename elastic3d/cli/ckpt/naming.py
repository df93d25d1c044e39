"""Which checkpoint is meant, and what points to it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from checkpointing import Store
from checkpointing.errors import NoCheckpoint
from checkpointing.format.refs import Ref
from checkpointing.reading import naming
from elastic3d.errors import UsageError

DISTRUSTED = "distrusted"
"""The label of checkpoints that a device which computes wrongly may have spoilt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """The checkpoint that is meant. expected: its record's digest, if a ref holds it."""

    name: str
    expected: str | None = None


def choose(store: Store, text: str) -> Chosen:
    """Return the checkpoint that `text` means; NoCheckpoint if it means none, or several."""
    name, expected = naming.find(store, text)
    return Chosen(name=name, expected=expected)


def committed(store: Store) -> tuple[str, ...]:
    """Return the names of all committed checkpoints, newest first."""
    return naming.committed(store, naming.read_ref(store))


def before(store: Store, name: str) -> str:
    """Return the checkpoint that was committed before `name`; UsageError if none was, NoCheckpoint if it is gone."""
    listed = committed(store)
    if name not in listed:
        raise NoCheckpoint(f"store {store.url}: {name} is not kept any more: a collection has just dropped it")
    later = listed.index(name)
    if later + 1 == len(listed):
        raise UsageError(f"store {store.url}: nothing was committed before {name}; name two checkpoints to compare")
    return listed[later + 1]


def labels(store: Store) -> dict[str, tuple[str, ...]]:
    """Return what points to each checkpoint of a store: see `labels_of`."""
    ref = naming.read_ref(store)
    return labels_of(ref, naming.committed(store, ref) if ref.distrusted else ()) if ref is not None else {}


def labels_of(ref: Ref, committed: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return what points to each checkpoint: latest, verified, vetted, tags; whether it is pinned, or distrusted.

    committed: those of which it is asked whether they are distrusted.
    """
    labels_by_name: dict[str, list[str]] = defaultdict(list)
    if ref.checkpoint is not None:
        labels_by_name[ref.checkpoint].append(naming.LATEST)
    if ref.verified is not None:
        labels_by_name[ref.verified.checkpoint].append(naming.VERIFIED)
    if ref.vetted is not None:
        labels_by_name[ref.vetted.checkpoint].append(naming.VETTED)
    for tag, target in sorted(ref.tags.items()):
        labels_by_name[target.checkpoint].append(f"tag {tag}")
    for checkpoint in ref.pins:
        labels_by_name[checkpoint].append("pinned")
    for checkpoint in committed:
        if ref.distrusts(checkpoint):
            labels_by_name[checkpoint].append(DISTRUSTED)
    return {name: tuple(marks) for name, marks in labels_by_name.items()}

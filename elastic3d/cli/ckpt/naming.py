"""Which checkpoint is meant, and what points to it."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from checkpointing import Store, read_latest
from checkpointing.errors import NoCheckpoint
from checkpointing.format import names
from elastic3d.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """The checkpoint that is meant. expected: its record's digest, where a ref has told it."""

    name: str
    expected: str | None = None


def choose(store: Store, text: str) -> Chosen:
    """Return the checkpoint that is meant by `text`; NoCheckpoint or UsageError where it is none, or several."""
    if text == "latest":
        ref = read_latest(store)
        if ref is None or ref.checkpoint is None:
            raise NoCheckpoint(f"store {store.url}: nothing was ever committed here")
        return Chosen(name=ref.checkpoint, expected=ref.record_digest)
    return Chosen(name=_resolve(store, text))


def committed(store: Store) -> tuple[str, ...]:
    """Return the names of all committed checkpoints, newest first."""
    ref = read_latest(store)
    return ref.committed if ref is not None else ()


def before(store: Store, name: str) -> str:
    """Return the checkpoint that was committed before `name`; UsageError where there is none."""
    listed = committed(store)
    later = listed.index(name) if name in listed else len(listed)
    if later + 1 >= len(listed):
        raise UsageError(f"store {store.url}: nothing was committed before {name}; name two checkpoints to compare")
    return listed[later + 1]


def labels(store: Store) -> dict[str, tuple[str, ...]]:
    """Return what points to each checkpoint: latest, verified, its tags, and whether it is pinned."""
    found: dict[str, list[str]] = defaultdict(list)
    ref = read_latest(store)
    if ref is not None and ref.checkpoint is not None:
        found[ref.checkpoint].append("latest")
    return {name: tuple(marks) for name, marks in found.items()}


def _resolve(store: Store, text: str) -> str:
    listed = committed(store)
    step = int(text) if text.isdecimal() and text.isascii() and len(text) < 19 else -1
    hits = [name for name in listed if (parsed := names.parse_checkpoint(name)) and parsed[0].step == step][:1]
    hits = hits or [name for name in listed if name.startswith(text)]
    if len(hits) == 1:
        return hits[0]
    if hits:
        raise UsageError(f"store {store.url}: {text!r} may be {', '.join(hits[:4])}; give more of the name")
    raise UsageError(f"store {store.url}: {text!r} is no checkpoint here; `elastic3d ckpt ls` shows those that are")

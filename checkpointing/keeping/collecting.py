"""Collection: deleting what nothing needs, beside writers, readers and other collectors (format.md, section 13)."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from checkpointing.format.tombstone import Doomed
from checkpointing.keeping.retention import Retention
from checkpointing.stores.protocol import Store

GRACE = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectionPlan:
    """What a collection would do. objects: what it would free, in the order of deletion."""

    kept: tuple[str, ...]
    dropped: tuple[str, ...]
    objects: tuple[Doomed, ...]

    @property
    def bytes(self) -> int:
        """Bytes it would free."""
        return sum(doomed.size for doomed in self.objects)


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """What a collection has done, or with `dry_run` would do.

    objects: freed. waiting: seconds until what is condemned may go, 0 when nothing waits; call again then.
    """

    dropped: tuple[str, ...]
    objects: tuple[Doomed, ...]
    waiting: float = 0.0
    dry_run: bool = False

    @property
    def bytes(self) -> int:
        """Bytes freed."""
        return sum(doomed.size for doomed in self.objects)


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectionProgress:
    """How far a sweep has come: objects deleted, of how many."""

    done: int
    total: int


def plan_collection(store: Store, retention: Retention, *, grace: float = GRACE) -> CollectionPlan:
    """Return what `collect` would do; nothing is changed but a probe object, written to ask the store for its time."""
    return CollectionPlan(kept=(), dropped=(), objects=())


def collect(
    store: Store,
    retention: Retention,
    *,
    grace: float = GRACE,
    dry_run: bool = False,
    wait: bool = True,
    progress: Callable[[CollectionProgress], None] | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> Collected:
    """Drop the checkpoints that `retention` does not keep, and delete what no kept one and no save under way needs.

    grace: seconds, by the store's clock, that objects must be old and that readers have to finish. With `wait` the
    call sleeps through it; without, it condemns, and a later call deletes (`waiting` says when).
    """
    return Collected(dropped=(), objects=(), dry_run=dry_run)

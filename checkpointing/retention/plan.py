"""What a collection would do (format.md, section 13, step 1)."""

from __future__ import annotations

from dataclasses import dataclass

from checkpointing.errors import FormatError, KeepRefused, NoCheckpoint, StoreError
from checkpointing.format.refs import Older, Ref
from checkpointing.format.tombstone import Doomed, Tombstone
from checkpointing.reading.announcing import announced_in
from checkpointing.reading.naming import committed, read_versioned
from checkpointing.reading.pending_deletions import read_tombstone
from checkpointing.retention.policy import Retention, bounded, retained
from checkpointing.retention.reach import Reach, condemn, is_being_written
from checkpointing.retention.store_clock import store_time
from checkpointing.stores.protocol import Entry, Store

GRACE = 300.0
"""Seconds that readers and writers have who did not announce themselves."""
LARGEST = 500_000  # objects of one tombstone, some 20 MB; the rest is deleted next time
_READS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectionPlan:
    """What a collection would do."""

    kept: tuple[str, ...]
    """Names of the checkpoints that would stay."""
    dropped: tuple[str, ...]
    """Names of those that would go."""
    objects: tuple[Doomed, ...]
    """Objects that it would free, in the order of deletion."""
    begun: tuple[Doomed, ...] = ()
    """Those of them that an earlier collection has already condemned."""
    over: int = 0
    """Bytes that the kept checkpoints would take above `keep_bytes`."""

    @property
    def bytes(self) -> int:
        """Bytes it would free."""
        return sum(doomed.size for doomed in self.objects)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """The outcome for one ref: what stays, and what may go. over: bytes that what stays takes above `keep_bytes`."""

    ref: Ref
    committed: tuple[str, ...]
    kept: tuple[str, ...]
    doomed: tuple[Doomed, ...]
    over: int = 0

    @property
    def dropped(self) -> tuple[str, ...]:
        """The checkpoints that are not kept."""
        kept = set(self.kept)
        return tuple(name for name in self.committed if name not in kept)


class Marker:
    """One listing of a store, compared with one ref after another."""

    def __init__(self, store: Store, retention: Retention, *, grace: float, now: float | None = None) -> None:
        """List the store. now: its time, which is asked for if it is not given."""
        self._store, self._retention, self._grace = store, retention, grace
        # The time is asked before the listing, so that nothing looks older than it is.
        self.now = store_time(store) if now is None else now
        # Announcements are read before it too: a writer that is done by then has left a manifest that the listing
        # shows.
        self._at_work = announced_in(store, self.now)
        self._entries: dict[str, Entry] = {entry.name: entry for entry in store.entries("")}
        self._reach = Reach(store)

    def mark(self) -> Mark | None:
        """Find what may go by the present ref; None if there is no ref, KeepRefused if that cannot be determined."""
        for last in [False] * _READS + [True]:
            ref, _ = read_versioned(self._store)
            if ref is None:
                return None
            try:
                return self._mark(ref)
            except (FormatError, NoCheckpoint) as error:
                # Another collection may have dropped the checkpoint that was to be read.
                if last or read_versioned(self._store)[0] == ref:
                    raise KeepRefused(
                        f"store {self._store.url}: nothing is collected, as what a kept checkpoint needs cannot be "
                        f"told: {error}. Repair that object, or untag or unpin the checkpoint and keep fewer"
                    ) from error
        raise AssertionError("the last try returns or raises")

    def deletable(self, tombstone: Tombstone, ref: Ref) -> tuple[Doomed, ...]:
        """Return those of a tombstone's objects that exist and that `ref` does not need, keeping all that it lists."""
        needed = self._reach.needed(ref, committed(self._store, ref), self._entries)
        needed |= self._reach.of_dropped(self._at_work.checkpoints)
        return tuple(
            doomed
            for doomed in tombstone.objects
            if (entry := self._entries.get(doomed.name)) is not None
            and doomed.name not in needed
            and not is_being_written(entry, self._at_work.writing_since)
        )

    def _mark(self, ref: Ref) -> Mark:
        everything = committed(self._store, ref)
        protected = ref.protected | self._at_work.checkpoints
        kept, over = retained(everything, self._retention, protected), 0
        limit = self._retention.keep_bytes
        if limit is not None:
            kept, total = bounded(kept, limit, protected, self._reach.objects)
            over = max(0, total - limit)
        needed = self._reach.needed(ref, kept, self._entries, relisted=len(kept) < len(everything))
        needed |= self._reach.of_dropped(self._at_work.checkpoints.difference(kept))
        doomed = condemn(
            self._entries, needed, now=self.now, grace=self._grace, writing_since=self._at_work.writing_since
        )
        return Mark(ref=ref, committed=everything, kept=kept, doomed=doomed[:LARGEST], over=over)


def plan_collection(store: Store, retention: Retention, *, grace: float = GRACE) -> CollectionPlan:
    """Return what `collect` would do now, without changing anything.

    A probe object is written to ask the store for its time; if writing is not allowed, the newest object's time is
    used.
    """
    try:
        now = store_time(store)
    except StoreError:
        now = max((entry.modified for entry in store.entries("")), default=0.0)
    marker = Marker(store, retention, grace=grace, now=now)
    mark = marker.mark()
    if mark is None:
        return CollectionPlan(kept=(), dropped=(), objects=())
    begun = _left(store, marker, mark.ref)
    first = {doomed.name for doomed in begun}
    return CollectionPlan(
        kept=mark.kept,
        dropped=mark.dropped,
        objects=(*begun, *(doomed for doomed in mark.doomed if doomed.name not in first)),
        begun=begun,
        over=mark.over,
    )


def _left(store: Store, marker: Marker, ref: Ref) -> tuple[Doomed, ...]:
    """Return what the present sweep still has to delete."""
    if ref.sweeping is None:
        return ()
    tombstone = read_tombstone(store, Older(name=ref.sweeping.tombstone, digest=ref.sweeping.digest))
    return marker.deletable(tombstone, ref) if tombstone is not None else ()

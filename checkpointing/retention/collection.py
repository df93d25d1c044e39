"""Collection: deletes what nothing needs, beside writers, readers and other collectors (format.md, section 13)."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

from checkpointing.errors import StoreError
from checkpointing.format import names
from checkpointing.format.encoding import hexdigest
from checkpointing.format.refs import (
    Older,
    Ref,
    Verdict,
    begun_ref,
    decide_begin,
    kept_ref,
)
from checkpointing.format.tombstone import Doomed, Tombstone, encode_tombstone
from checkpointing.reading.announcing import forget_expired
from checkpointing.retention.plan import GRACE, CollectionPlan, Mark, Marker, plan_collection
from checkpointing.retention.policy import Retention
from checkpointing.retention.sweep import Sweep, SweepProgress, sweep
from checkpointing.saving.ref_update import move, relist
from checkpointing.stores.protocol import Store, create

__all__ = ["GRACE", "Collected", "CollectionPlan", "SweepProgress", "collect", "plan_collection"]

_BEGINS = 16
_FORGOTTEN = 3600.0  # seconds after which an announcement that is not renewed is deleted
_CLAIMED = 86400.0  # seconds after which nobody waits any more for what a register decides


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """The result of a collection, or with `dry_run` what it would be."""

    dropped: tuple[str, ...] = ()
    """Checkpoints that are no longer committed."""
    objects: tuple[Doomed, ...] = ()
    """Objects that were freed."""
    spared: int = 0
    """Number of objects that were condemned but needed after all, or already gone."""
    waiting: float = 0.0
    """Seconds until what is condemned may be deleted, 0 if nothing waits; call again then."""
    over: int | None = None
    """Bytes that the kept checkpoints take above `keep_bytes`, if the protected ones alone are larger; None if that was
    not determined."""
    dry_run: bool = False
    """Nothing was deleted."""

    @property
    def bytes(self) -> int:
        """Bytes freed."""
        return sum(doomed.size for doomed in self.objects)


def collect(
    store: Store,
    retention: Retention,
    *,
    grace: float = GRACE,
    dry_run: bool = False,
    wait: bool = True,
    progress: Callable[[SweepProgress], None] | None = None,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> Collected:
    """Drop the checkpoints that `retention` does not keep, and delete what no kept one and no save under way needs.

    grace: the least age of deleted objects, and the time that readers have to finish, in seconds by the store's clock.
    Readers that announce themselves (`checkpointing.reading.announcing`) have as long as they need; the grace is for
    the rest, which from twice ANNOUNCED_AFTER on are only those who may not write to the store. With `wait` the call
    sleeps through it; without, it condemns, and a later call deletes (`waiting` says when). A sweep that an earlier
    collection began is finished first. After StoreError, call it again; KeepRefused if a kept checkpoint cannot be
    read: nothing was deleted then.
    """
    if grace < 0:
        raise ValueError(f"a grace of {grace} seconds is not one")
    if dry_run:
        plan = plan_collection(store, retention, grace=grace)
        return Collected(dropped=plan.dropped, objects=plan.objects, over=plan.over, dry_run=True)
    hand = Sweep(store=store, wait=wait, progress=progress or (lambda _: None), sleep=sleep, clock=clock)
    before = sweep(hand)
    if before.waiting:
        return Collected(objects=before.objects, spared=before.spared, waiting=before.waiting)
    marker = Marker(store, retention, grace=grace)
    dropped, over = _begin(store, marker, grace)
    forget_expired(store, marker.now, _FORGOTTEN)
    _forget_claims(store, marker.now)
    after = sweep(hand)
    return Collected(
        dropped=dropped,
        objects=(*before.objects, *after.objects),
        spared=before.spared + after.spared,
        waiting=after.waiting,
        over=over,
    )


def _forget_claims(store: Store, now: float) -> None:
    """Delete claims whose writers have died: a committed record is under its own name."""
    for entry in list(store.entries(names.CLAIMS)):
        if names.is_claim(entry.name) and now - entry.modified >= _CLAIMED:
            with contextlib.suppress(StoreError):
                store.delete(entry.name)


def _begin(store: Store, marker: Marker, grace: float) -> tuple[tuple[str, ...], int]:
    """Drop checkpoints and begin a sweep, in one swap; return the dropped ones, and the kept bytes above the bound."""
    for last in [False] * _BEGINS + [True]:
        mark = marker.mark()
        if mark is None or mark.ref.sweeping is not None:
            return (), mark.over if mark is not None else 0  # another collector's
        expired = any(tombstone.until <= marker.now for tombstone in mark.ref.quarantined)
        if not (mark.doomed or mark.dropped or expired):
            return (), mark.over
        if _try(store, marker, mark, grace, last=last):
            return mark.dropped, mark.over
    raise AssertionError("the last try returns or raises")


def _try(store: Store, marker: Marker, mark: Mark, grace: float, *, last: bool) -> bool:
    """Begin as marked; False if the ref has moved meanwhile, so that a new mark must spare what is new."""
    tombstone = names.tombstone(secrets.token_hex(16))
    data = encode_tombstone(Tombstone(grace=grace, objects=mark.doomed))
    if mark.doomed:
        create(store, tombstone, data)
    link = Older(name=tombstone, digest=hexdigest(data))

    def decide(ref: Ref | None) -> Verdict:
        verdict = decide_begin(ref, tombstone)
        if verdict is Verdict.MOVE and ref is not None and not _same(ref, mark.ref):
            return Verdict.RECHECK
        return verdict

    def build(ref: Ref | None, write_id: str) -> Ref:
        assert ref is not None, "decided"
        earlier, older = ref.earlier, ref.older
        if mark.dropped:
            earlier, older = relist(store, tuple(name for name in mark.kept if name != ref.checkpoint))
        moved = kept_ref(ref, earlier, older, marker.now, write_id)
        return begun_ref(moved, link, write_id) if mark.doomed else moved

    verdict, _ = move(store, decide, build, shadow=True)
    if verdict is Verdict.RECHECK:
        if mark.doomed:
            store.delete(tombstone)
        if last:
            raise StoreError(f"store {store.url}: {_BEGINS} commits came in the way of a collection; try again")
        return False
    return verdict in (Verdict.MOVE, Verdict.DONE)


def _same(ref: Ref, marked: Ref) -> bool:
    """Return whether a mark made for another ref holds for `ref`, which lists, keeps and condemns the same."""
    return (ref.checkpoint, ref.earlier, ref.older, ref.protected, ref.sweeps, ref.quarantined) == (
        marked.checkpoint, marked.earlier, marked.older, marked.protected, marked.sweeps, marked.quarantined,
    )  # fmt: skip

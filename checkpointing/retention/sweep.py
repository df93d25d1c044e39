"""Carries out a sweep: waits, takes it over, rechecks, deletes and ends it (format.md, section 13, steps 4 to 8)."""

from __future__ import annotations

import contextlib
import functools
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from checkpointing.errors import FormatError, KeepRefused, NoCheckpoint, StoreError
from checkpointing.format.refs import Older, Ref, Sweeping, Verdict, decide_end, decide_take, ended_ref, taken_ref
from checkpointing.format.tombstone import Doomed, Tombstone
from checkpointing.reading.naming import read_versioned
from checkpointing.reading.pending_deletions import read_tombstone
from checkpointing.retention.plan import Marker
from checkpointing.retention.policy import Retention
from checkpointing.retention.store_clock import modified_at, store_time
from checkpointing.saving.ref_update import move
from checkpointing.stores.protocol import Store

PATIENCE = 3600.0  # seconds by the store's clock, after the grace, before another owner's sweep is taken over
QUARANTINE = 86400.0
_POLL = 30.0  # another collector may finish before its time is over
_BATCH = 64
_DELETERS = 8
_PAUSE = 30.0  # seconds by this process after which it checks again whether it still owns the sweep


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepProgress:
    """How far a sweep has come, in objects."""

    done: int
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """How to carry out a sweep. clock: seconds of this process, for pauses only."""

    store: Store
    wait: bool
    progress: Callable[[SweepProgress], None]
    sleep: Callable[[float], None]
    clock: Callable[[], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Swept:
    """Objects that a sweep deleted, and spared as still needed or already gone. waiting: seconds until it may."""

    objects: tuple[Doomed, ...] = ()
    spared: int = 0
    waiting: float = 0.0


def sweep(hand: Sweep) -> Swept:
    """Finish the present sweep, if there is one and it is time; KeepRefused if it must not be, which ends the sweep."""
    store, owner = hand.store, secrets.token_hex(16)
    while True:
        ref, _ = read_versioned(store)
        if ref is None or ref.sweeping is None:
            return Swept()
        on = ref.sweeping
        tombstone = read_tombstone(store, Older(name=on.tombstone, digest=on.digest))
        if tombstone is None:
            continue  # the sweep has just ended
        waiting = _waiting(store, on, tombstone)
        if waiting > 0:
            if not hand.wait:
                return Swept(waiting=waiting)
            hand.sleep(min(waiting, _POLL))
            continue
        refused: KeepRefused | None = None
        doomed: tuple[Doomed, ...] = ()
        try:
            # By a ref that is younger than the begin: later commits name nothing that is condemned.
            doomed = Marker(store, Retention(), grace=0.0).deletable(tombstone, ref)
        except (FormatError, NoCheckpoint) as error:
            refused = KeepRefused(
                f"store {store.url}: a collection was ended before it deleted anything more, as what a kept checkpoint "
                f"needs cannot be told: {error}. Repair that object, or untag or unpin the checkpoint and keep fewer"
            )
        try:
            verdict, _ = move(
                store,
                functools.partial(_decide_take, on=on, owner=owner),
                lambda ref, write_id: taken_ref(_there(ref), owner, write_id),
            )
            if verdict not in (Verdict.MOVE, Verdict.DONE):
                continue
            if refused is not None:
                _end(store, on.tombstone, owner, clean=True)
                raise refused
            objects = _carry_out(hand, on.tombstone, owner, doomed)
        except (KeyboardInterrupt, StoreError):
            # The next one would wait an hour. Deletions without an answer may still happen: not clean.
            with contextlib.suppress(StoreError):
                _end(store, on.tombstone, owner, clean=False)
            raise
        return Swept(objects=objects, spared=len(tombstone.objects) - len(doomed))


def _decide_take(ref: Ref | None, *, on: Sweeping, owner: str) -> Verdict:
    return decide_take(ref, on.tombstone, owner, seen=on.owner)


def _waiting(store: Store, on: Sweeping, tombstone: Tombstone) -> float:
    """Return the seconds until the sweep may be taken over, 0 or less if it may be now."""
    modified = modified_at(store, on.tombstone)
    if modified is None:
        return 1.0  # a stale listing
    return modified + tombstone.grace + (PATIENCE if on.owner else 0.0) - store_time(store)


def _carry_out(hand: Sweep, tombstone: str, owner: str, doomed: Sequence[Doomed]) -> tuple[Doomed, ...]:
    """Delete as long as this owner has the sweep, and end it."""
    done: list[Doomed] = []
    hand.progress(SweepProgress(done=0, total=len(doomed)))
    for start in range(0, len(doomed), _BATCH):
        if not _owns(hand.store, tombstone, owner):
            return tuple(done)
        done += _delete(hand, doomed[start : start + _BATCH])
        hand.progress(SweepProgress(done=len(done), total=len(doomed)))
    _end(hand.store, tombstone, owner, clean=len(done) == len(doomed))
    return tuple(done)


def _end(store: Store, tombstone: str, owner: str, *, clean: bool) -> None:
    until = store_time(store) + QUARANTINE
    _, ref = move(
        store,
        lambda ref: decide_end(ref, tombstone, owner),
        lambda ref, write_id: ended_ref(_there(ref), clean=clean, until=until, write_id=write_id),
        shadow=True,
    )
    if ref is not None and all(link.name != tombstone for link in ref.condemning):
        store.delete(tombstone)


def _delete(hand: Sweep, batch: Sequence[Doomed]) -> list[Doomed]:
    """Delete objects and return those that are certainly gone; no deletion begins after a pause of this process."""
    began = hand.clock()

    def delete(doomed: Doomed) -> bool:
        if hand.clock() - began > _PAUSE:
            return False
        try:
            hand.store.delete(doomed.name)
        except StoreError:
            return False  # the deletion may still happen; if not, the object is garbage for the next collection
        return True

    with ThreadPoolExecutor(_DELETERS, thread_name_prefix="sweep") as pool:
        return [doomed for doomed, gone in zip(batch, pool.map(delete, batch), strict=True) if gone]


def _owns(store: Store, tombstone: str, owner: str) -> bool:
    ref, _ = read_versioned(store)
    on = ref.sweeping if ref is not None else None
    return on is not None and (on.tombstone, on.owner) == (tombstone, owner)


def _there(ref: Ref | None) -> Ref:
    assert ref is not None, "decided"
    return ref

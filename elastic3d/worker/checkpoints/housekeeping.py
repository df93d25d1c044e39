"""What the leader does after a commit, in no hurry: it reads back what was committed, and deletes what is not kept.

`verified` moves to a checkpoint once its record and manifests have been read from the store again and a sample of its
tiles, or all of them, have matched their digests. Only the newest checkpoint is read back: where commits come faster
than that, some are passed over. `vetted` moves after each commit and each audit that vouches for another one.
"""

from __future__ import annotations

import queue
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from checkpointing import Checkpoint, Collected, Retention, Store, collect, mark_verified, resolve
from checkpointing.errors import CheckpointError
from checkpointing.format.manifest import StoredTile
from checkpointing.format.tiles import Box, TensorSpec
from checkpointing.reading.announcing import reading
from elastic3d import threads
from elastic3d.clock import SYSTEM, Clock
from elastic3d.worker.checkpoints.vetting import LiveAudits, vet
from elastic3d.worker.options import Saving, Verification

SAMPLE = 32
"""Number of tiles in a sample, each of at most 4 MiB."""
COLLECT_EVERY = 300.0
"""Seconds between two collections unless one is waited for: each lists the whole store."""
_SOONEST = 1.0  # seconds until the next check whether what is condemned may be deleted
_AT_ONCE = 64 << 20  # bytes read back before their memory is freed
_STORE = "store"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """A checkpoint was read back and is good; `verified` points to it or to a newer one. at: when it was committed."""

    step: int
    at: float
    how: Verification
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyFailed:
    """A committed checkpoint could not be read back, or is not what was written; `verified` stays where it was."""

    step: int
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Swept:
    """What retention does not keep has been deleted."""

    collected: Collected


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounded:
    """What is kept was compared with `keep_bytes`: it takes `over` bytes more, all protected; 0 if it fits."""

    over: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepFailed:
    """A collection failed; the next one runs when it is due. Nothing that is needed is ever deleted."""

    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Vetted:
    """`vetted` was looked after. step: where it points now, None for nowhere; why: then, for people.

    error: why it could not be looked after, "" if it could.
    """

    step: int | None
    why: str = ""
    error: str = ""


HousekeeperEvent = Verified | VerifyFailed | Vetted | Swept | Bounded | SweepFailed


def verify_committed(store: Store, name: str, how: Verification) -> None:
    """Read a checkpoint back; CheckpointError when it is not as it was written. Holds at most 64 MiB in memory."""
    with reading(store, name) as checkpoint:
        _read_back(checkpoint, how)


def _read_back(checkpoint: Checkpoint, how: Verification) -> None:
    tiles: Sequence[StoredTile] = checkpoint.tiles
    if how is Verification.SAMPLE and len(tiles) > SAMPLE:
        # The same sample each time a checkpoint is read back, and another one for each checkpoint.
        tiles = random.Random(checkpoint.name).sample(list(tiles), SAMPLE)
    offers = {(offer.spec.key, offer.box): offer for offer in checkpoint.offers(_STORE)}
    sources = {_STORE: checkpoint.source(_STORE)}

    def destination(spec: TensorSpec, box: Box) -> memoryview:
        return memoryview(bytearray(box.numel * spec.itemsize))

    for batch in _batches(tiles):
        resolve(
            [(tile.spec, tile.box) for tile in batch],
            [offers[tile.spec.key, tile.box] for tile in batch],
            sources,
            destination,
        )


def _batches(tiles: Sequence[StoredTile]) -> Iterator[list[StoredTile]]:
    batch: list[StoredTile] = []
    room = _AT_ONCE
    for tile in tiles:
        batch.append(tile)
        room -= tile.nbytes
        if room <= 0:
            yield batch
            batch, room = [], _AT_ONCE
    if batch:
        yield batch


class Housekeeper:
    """Works on a thread of its own, where it calls `report`. The leader's committer announces commits to it.

    audits: whether the run asks for audits, so that checkpoints may be vetted.
    """

    def __init__(
        self,
        store: Store,
        saving: Saving,
        report: Callable[[HousekeeperEvent], None],
        *,
        audits: bool = False,
        clock: Clock = SYSTEM,
    ) -> None:
        self._audits = audits
        self._store, self._saving, self._report, self._clock = store, saving, report, clock
        # What was committed, what audits vouch for, or None, for the end.
        self._jobs: queue.SimpleQueue[tuple[str, int, float] | LiveAudits | None] = queue.SimpleQueue()
        self._live: LiveAudits | None = None
        self._all_vetted = False
        self._collected_at: float | None = None
        self._wakes_at: float | None = None  # when what is condemned may be deleted
        self._thread = threads.start(self._run, name="elastic3d-keep", edge=threads.Edge.AGAIN)

    def committed(self, name: str, step: int, at: float) -> None:
        """Take over a checkpoint that was committed `at` (monotonic)."""
        self._jobs.put((name, step, at))

    def audited(self, live: LiveAudits) -> None:
        """Take over what audits vouch for now."""
        self._jobs.put(live)

    def close(self, patience: float) -> None:
        """Stop; the work under way has `patience` seconds to end."""
        self._jobs.put(None)
        self._thread.join(timeout=patience)

    def _run(self) -> None:
        saving = self._saving
        retention = Retention(keep_last=saving.keep, keep_every=saving.keep_every or None, keep_bytes=saving.keep_bytes)
        while True:
            try:
                job = self._newest()
            except queue.Empty:
                self._collect(retention)
                continue
            if job is None:
                return
            if self._audits and not (self._all_vetted and isinstance(job, LiveAudits)):
                self._vet()
            if isinstance(job, LiveAudits):
                continue
            if saving.verification is not Verification.OFF:
                self._verify(*job)
            if (saving.keep is not None or saving.keep_bytes is not None) and self._due():
                self._collect(retention)

    def _newest(self) -> tuple[str, int, float] | LiveAudits | None:
        """Return the newest checkpoint to look after, what audits vouch for where there is none, None at the end.

        queue.Empty when a collection is due.
        """
        wakes = self._wakes_at
        job = self._jobs.get(timeout=None if wakes is None else max(0.0, wakes - self._clock.monotonic()))
        if isinstance(job, LiveAudits):
            self._live = job
        while job is not None and not self._jobs.empty():
            # The last one before the end is still verified.
            following = self._jobs.get()
            if following is None:
                self._jobs.put(None)
                break
            if isinstance(following, LiveAudits):
                self._live = following
            if isinstance(job, LiveAudits) or not isinstance(following, LiveAudits):
                job = following
        return job

    def _vet(self) -> None:
        """Move `vetted` on. After a failure the next commit or audit tries again."""
        try:
            vetting = vet(self._store, self._live)
        except (CheckpointError, OSError) as error:
            self._report(Vetted(step=None, error=str(error)))
            return
        self._all_vetted = vetting.newest
        self._report(Vetted(step=vetting.step, why=vetting.why))

    def _verify(self, name: str, step: int, at: float) -> None:
        begun = self._clock.monotonic()
        how = self._saving.verification
        try:
            verify_committed(self._store, name, how)
            mark_verified(self._store, name)
        except (CheckpointError, OSError) as error:
            self._report(VerifyFailed(step=step, error=str(error)))
            return
        self._report(Verified(step=step, at=at, how=how, seconds=self._clock.monotonic() - begun))

    def _due(self) -> bool:
        now = self._clock.monotonic()
        if self._wakes_at is not None and now >= self._wakes_at:
            return True
        return self._collected_at is None or now - self._collected_at >= COLLECT_EVERY

    def _collect(self, retention: Retention) -> None:
        self._collected_at, self._wakes_at = self._clock.monotonic(), None
        try:
            collected = collect(self._store, retention, grace=self._saving.grace, wait=False)
        except (CheckpointError, OSError) as error:
            self._report(SweepFailed(error=str(error)))
            return
        if collected.dropped or collected.objects:
            self._report(Swept(collected=collected))
        if collected.waiting:
            self._wakes_at = self._clock.monotonic() + max(_SOONEST, collected.waiting)
        if retention.keep_bytes is not None and collected.over is not None:
            self._report(Bounded(over=collected.over))

"""A node's part in the run's checkpoints: the upload of its slots' tiles and, where it leads, the commits."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from checkpointing import Store
from elastic3d import threads
from elastic3d.clock import SYSTEM, Clock
from elastic3d.distrust import Distrust
from elastic3d.membership.records import SavedStep
from elastic3d.port import StepRecord
from elastic3d.values import Generation
from elastic3d.worker.checkpoints.committer import (
    CommitDone,
    CommitFailed,
    CommitNeedless,
    Committer,
    CommitterEvent,
    FencedStore,
    RefRepaired,
)
from elastic3d.worker.checkpoints.housekeeping import (
    Bounded,
    Housekeeper,
    HousekeeperEvent,
    SweepFailed,
    Swept,
    Verified,
    VerifyFailed,
    Vetted,
)
from elastic3d.worker.checkpoints.uploader import TilesUploaded, Uploader, WriteFailed, rest_after
from elastic3d.worker.checkpoints.vetting import LiveAudits
from elastic3d.worker.checkpoints.writing import CheckpointWriter
from elastic3d.worker.journal import Journal
from elastic3d.worker.options import Saving
from elastic3d.worker.processes.slot import SlotPort
from elastic3d.worker.pulse import Figures

NOT_AUDITED = "audits are off: health=elastic3d.Health(audit=...) turns them on"

COMMIT_PATIENCE = 10.0
"""Seconds for which the leader's node waits for the commit of what it wrote before it begins the next checkpoint."""


class Checkpoints:
    """Called on the keeper's main thread, which learns of writes through `tell` and passes them on to `heard`.

    settled: called on the committer's thread for each save that is committed, or, with the error, that never will be.
    audits: whether the run asks for audits.
    """

    def __init__(
        self,
        store: Store,
        saving: Saving,
        slots: Sequence[SlotPort],
        tell: Callable[[TilesUploaded | WriteFailed], None],
        *,
        journal: Journal,
        figures: Figures,
        clock: Clock = SYSTEM,
        rest: Callable[[int], float] = rest_after,
        settled: Callable[[SavedStep, str], None] = lambda saved, error: None,
        audits: bool = False,
    ) -> None:
        self._vouched = (0, -1)  # the newest generation, and the newest step that audits vouched for in it
        self._vetted_step: int | None = None
        figures.unvetted("" if audits else NOT_AUDITED)
        self._settled = settled
        self._limit, self._over = saving.keep_bytes, 0
        self._slots, self._journal, self._figures, self._clock = slots, journal, figures, clock
        self._leads = False
        self._written: dict[int, SavedStep] = {}
        self._writer = writer = CheckpointWriter(store, saving, len(slots))
        self._housekeeper = Housekeeper(store, saving, self._kept, audits=audits, clock=clock)
        self._committer = Committer(store, self._committed, clock=clock)
        self._uploaders = [
            Uploader(slot, writer.write, tell, patience=self._patience, rest=rest, clock=clock) for slot in slots
        ]

    # What the membership says.

    def fence(self, number: int, distrusted: tuple[Distrust, ...] = ()) -> None:
        """Become the leader: fence off older leaders, and have the store keep rules for its checkpoints."""
        self._leads = True
        self._committer.fence(number, distrusted)

    def commit(self, saved: SavedStep, number: int) -> None:
        """Commit what all nodes wrote."""
        self._committer.commit(saved, number)

    def begin(self) -> None:
        """Tell the trainers of a new generation which slots would take a checkpoint."""
        for slot, uploader in zip(self._slots, self._uploaders, strict=True):
            slot.set_ready(uploader.ready)

    def forget(self) -> None:
        """Begin anew under another incarnation."""
        self._leads = False
        self._written.clear()

    def distrust(self, damaged: Collection[str]) -> None:
        """Base no checkpoint on these, which were found damaged."""
        self._writer.distrust(damaged)

    def audited(self, record: StepRecord, generation: Generation) -> None:
        """Take note of a step: if audits vouch for more than before, the leader's node vets checkpoints by it.

        What they vouched for at a generation's first step says nothing of its nodes: others may have been audited then.
        """
        number, newest = self._vouched
        if record.generation != generation.number or (number == record.generation and record.clean <= newest):
            return
        self._vouched = (record.generation, record.clean)
        if self._leads and number == record.generation:
            clean = dict.fromkeys((node.name for node in generation.nodes), record.clean)
            self._housekeeper.audited(LiveAudits(generation=record.generation, clean=clean))

    # Snapshots.

    def offer(self, slot: int, step: int, generation: Generation) -> None:
        """Write a slot's snapshot that was taken for a checkpoint."""
        self._uploaders[slot].offer(step, generation)

    def flush(self, step: int, generation: Generation) -> set[int]:
        """Write every slot's snapshot of `step`, the last there will be; return the slots that have already done so."""
        made = (step, generation.number, generation.attempt)
        there = {slot for slot, saved in self._written.items() if (saved.step, saved.made_in, saved.attempt) == made}
        for uploader in self._uploaders:
            uploader.flush(step, generation)
        return there

    def retry(self, slot: int, step: int, generation: Generation) -> None:
        """Write a slot's snapshot of `step` again, after a failure."""
        self._uploaders[slot].flush(step, generation, again=True)

    def heard(self, event: TilesUploaded | WriteFailed) -> SavedStep | None:
        """Take note of how a write ended; return the save once all slots of the node have written it."""
        if isinstance(event, WriteFailed):
            age = self._figures.checkpoint_age(self._clock.monotonic())
            self._figures.failed(event.step, event.error)
            self._journal.emit("checkpoint.failed", step=event.step, error=event.error, age=age, slot=event.slot)
            return None
        step = event.saved.step
        self._journal.emit(
            "checkpoint.written",
            step=step,
            made_in=event.saved.made_in,
            bytes=event.bytes,
            new=event.new,
            seconds=event.seconds,
            slot=event.slot,
        )
        if self._figures.wrote(step):
            self._journal.emit("checkpoint.mended", step=step)
        self._written[event.slot] = event.saved
        same = len(self._written) == len(self._slots) and len(set(self._written.values())) == 1
        return event.saved if same else None

    # The end.

    def close_uploaders(self, patience: float) -> None:
        """End the writes; those under way share `patience` seconds."""
        self._close([uploader.close for uploader in self._uploaders], patience)

    def close_committer(self, patience: float) -> None:
        """End the commits and the verification of the last one; they share `patience` seconds.

        What is under way after that, be it a write, keeps this process from ending only where it cannot be killed.
        """
        self._close([self._committer.close, self._housekeeper.close], patience)
        for slot, uploader in enumerate(self._uploaders):
            if uploader.writing is not None:
                self._journal.emit("checkpoint.abandoned", step=uploader.writing, slot=slot)
        threads.forget_pools()

    def _close(self, closes: Sequence[Callable[[float], None]], patience: float) -> None:
        until = self._clock.monotonic() + patience
        for close in closes:
            close(max(0.0, until - self._clock.monotonic()))

    def _patience(self) -> float:
        return COMMIT_PATIENCE if self._leads else 0.0

    def _committed(self, event: CommitterEvent) -> None:
        """Take note of a commit. Runs on the committer's thread, since the main one may be waiting for it to end."""
        now = self._clock.monotonic()
        match event:
            case FencedStore():
                if event.age is not None:
                    self._figures.committed(event.step, now - event.age)
                if event.verified_age is not None:
                    self._figures.verified(event.verified_step, now - event.verified_age)
                if event.vetted_age is not None:
                    self._figures.vetted(event.vetted_step, now - event.vetted_age)
            case RefRepaired():
                self._journal.emit("store.repaired", checkpoint=event.checkpoint)
            case CommitNeedless():
                self._settled(event.saved, "")
            case CommitFailed():
                self._failed(event, now)
            case CommitDone():
                self._done(event, now)

    def _failed(self, event: CommitFailed, now: float) -> None:
        age = self._figures.checkpoint_age(now)
        step = event.saved.step if event.saved is not None else -1
        self._leads = self._leads and not event.deposed
        self._figures.failed(step, event.error)
        self._journal.emit("checkpoint.failed", step=step, error=event.error, age=age)
        if event.saved is not None and not event.again:
            for uploader in self._uploaders:
                uploader.settled(event.saved)
            self._settled(event.saved, event.error)

    def _done(self, event: CommitDone, now: float) -> None:
        self._journal.emit(
            "checkpoint.committed",
            step=event.saved.step,
            made_in=event.saved.made_in,
            moved=event.committed.moved,
            seconds=event.seconds,
        )
        if self._figures.committed(event.saved.step, now):
            self._journal.emit("checkpoint.mended", step=event.saved.step)
        for uploader in self._uploaders:
            uploader.settled(event.saved)
        self._settled(event.saved, "")
        self._housekeeper.committed(event.committed.checkpoint, event.saved.step, now)

    def _kept(self, event: HousekeeperEvent) -> None:
        """Take note of what became of a checkpoint after its commit. Runs on the housekeeper's thread."""
        match event:
            case Verified():
                self._figures.verified(event.step, event.at)
                self._journal.emit("checkpoint.verified", step=event.step, kind=str(event.how), seconds=event.seconds)
            case Vetted():
                self._vetted(event)
            case VerifyFailed():
                self._journal.emit("checkpoint.unverified", step=event.step, error=event.error)
            case Swept():
                dropped, freed = len(event.collected.dropped), event.collected.bytes
                self._journal.emit("checkpoint.collected", checkpoints=dropped, bytes=freed)
            case Bounded():
                self._bounded(event.over)
            case SweepFailed():
                self._journal.emit("checkpoint.uncollected", error=event.error)

    def _vetted(self, event: Vetted) -> None:
        if event.error:
            self._journal.emit("checkpoint.unvetted", error=event.error)
        elif event.step is None:
            self._figures.unvetted(event.why)
            self._vetted_step = None
        elif event.step != self._vetted_step:
            self._figures.vetted(event.step, self._clock.monotonic())
            self._journal.emit("checkpoint.vetted", step=event.step)
            self._vetted_step = event.step

    def _bounded(self, over: int) -> None:
        """Report when what must stay begins to exceed `keep_bytes`, and when it no longer does."""
        was, self._over = self._over, over
        self._figures.store(f"what must be kept is {over} bytes above keep_bytes={self._limit}" if over else "")
        if over and not was:
            self._journal.emit("store.limit_exceeded", over=over, limit=self._limit)
        elif was and not over:
            self._journal.emit("store.limit_kept", limit=self._limit)

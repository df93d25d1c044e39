"""The upload of one slot's tiles: its node's keeper writes them from snapshots while training goes on.

An uploader has one thread, so that a slow store delays the next checkpoint and nothing else. A failed write never stops
training: it is reported, and after a rest that grows each time the uploader is ready for another. Between writes it
says whether it is ready: the step vote begins a checkpoint only when every rank is, so that all write the same steps.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

from checkpointing.errors import CheckpointError
from elastic3d import threads
from elastic3d.clock import SYSTEM, Clock
from elastic3d.errors import StateError
from elastic3d.membership.records import SavedStep
from elastic3d.values import Generation
from elastic3d.worker.processes.slot import PinnedSnapshot, SlotPort

LONGEST_REST = 60.0


def rest_after(failures: int) -> float:
    """Return how many seconds to rest after so many failures in a row."""
    return float(min(LONGEST_REST, 2.0 ** (failures - 1)))


@dataclass(frozen=True, slots=True, kw_only=True)
class TilesUploaded:
    """A slot's tiles of a step are in the store. bytes: of all tiles; new: of those that had to be written.

    seconds: how long the write took.
    """

    slot: int
    saved: SavedStep
    bytes: int
    new: int
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteFailed:
    """A slot's tiles of a step could not be written; another step is tried after `rest` seconds."""

    slot: int
    step: int
    error: str
    rest: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    step: int
    generation: Generation
    last: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Settled:
    saved: SavedStep


Write = Callable[[PinnedSnapshot, SavedStep, bool], tuple[int, int]]
"""Writes a pinned snapshot, which may be the last; returns the bytes of its tiles, and of those it had to write."""


class Uploader:
    """Writes those snapshots of one slot that become checkpoints, and reports each through `tell`.

    patience: seconds to wait for a write to be committed before the next begins; asked after each write, 0 where nobody
    here would learn of the commit. rest: seconds to rest after so many failures in a row.
    """

    def __init__(
        self,
        slot: SlotPort,
        write: Write,
        tell: Callable[[TilesUploaded | WriteFailed], None],
        *,
        patience: Callable[[], float] = lambda: 0.0,
        rest: Callable[[int], float] = rest_after,
        clock: Clock = SYSTEM,
    ) -> None:
        self._slot, self._store, self._tell = slot, write, tell
        self._patience, self._rest_after, self._clock = patience, rest, clock
        self._jobs: queue.SimpleQueue[_Job | _Settled | None] = queue.SimpleQueue()
        self._busy = False
        self._offered = (-1, "")
        self._lock = threading.Lock()
        self._failures = 0
        self._waits: SavedStep | None = None
        self._writing: _Job | None = None
        self._rest: float | None = None  # None: until there is something to do
        self._thread = threads.start(
            self._run, name=f"upload-{slot.index}", edge=threads.Edge.AGAIN, failed=self._broken
        )

    @property
    def ready(self) -> bool:
        """Whether a checkpoint would be written at once."""
        return not self._busy

    @property
    def writing(self) -> int | None:
        """The step of the write under way, None while there is none."""
        job = self._writing
        return None if job is None else job.step

    def offer(self, step: int, generation: Generation) -> None:
        """Write the pinned snapshot of `step`, made in `generation`; unpin it if the previous write is not done."""
        if self._busy or self._offered == (step, generation.key):
            self._slot.unpin(step)
        else:
            self._put(step, generation, last=False)

    def flush(self, step: int, generation: Generation, *, again: bool = False) -> None:
        """Write the snapshot of `step`, the last there will be, whatever is being written now.

        again: even if it has been written, or tried, before.
        """
        if again or self._offered != (step, generation.key):
            self._put(step, generation, last=True)

    def settled(self, saved: SavedStep) -> None:
        """Take note that a checkpoint is committed: the next may begin."""
        self._jobs.put(_Settled(saved=saved))

    def close(self, patience: float) -> None:
        """Stop; the present write has `patience` seconds to end."""
        self._jobs.put(None)
        self._thread.join(timeout=patience)

    def _put(self, step: int, generation: Generation, *, last: bool) -> None:
        with self._lock:
            self._busy, self._offered = True, (step, generation.key)
            self._jobs.put(_Job(step=step, generation=generation, last=last))

    def _run(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=self._rest)
            except queue.Empty:
                self._rest = None
                self._rested()
                continue
            if job is None:
                return
            if isinstance(job, _Settled):
                if self._waits is not None and self._waits == job.saved:
                    self._rest = None
                    self._rested()
                continue
            self._writing = job
            said = self._write(job)
            self._writing = None
            self._rest = self._after(said) or None
            if self._rest is None:
                # Before the report: its receiver may offer the next snapshot at once.
                self._rested()
            self._tell(said)

    def _broken(self, error: BaseException) -> None:
        """Treat a write that ended in a way nobody foresaw as failed."""
        job, self._writing = self._writing, None
        if job is not None:
            said = self._write_failed(job, f"{type(error).__name__}: {error}")
            self._rest = said.rest
            self._tell(said)

    def _rested(self) -> None:
        """Become ready again, unless more is waiting to be written."""
        self._waits = None
        with self._lock:
            if self._jobs.empty():
                self._busy = False
                self._slot.set_ready(True)

    def _after(self, said: TilesUploaded | WriteFailed) -> float:
        """Return how long to rest."""
        if isinstance(said, WriteFailed):
            return said.rest
        self._failures = 0
        patience = self._patience()
        self._waits = said.saved if patience else None
        return patience

    def _write(self, job: _Job) -> TilesUploaded | WriteFailed:
        made, begun = job.generation, self._clock.monotonic()
        saved = SavedStep(step=job.step, made_in=made.number, attempt=made.attempt, world=made.world)
        try:
            with self._slot.pieces(job.step) as pinned:
                if pinned.generation != made.number:
                    raise StateError(
                        f"step {job.step} was made again in generation {pinned.generation}, perhaps cut differently: "
                        f"that of generation {made.number} is no longer in memory; nothing is lost, use a newer step"
                    )
                total, new = self._store(pinned, saved, job.last)
        except (CheckpointError, StateError, OSError) as error:
            return self._write_failed(job, str(error))
        seconds = self._clock.monotonic() - begun
        return TilesUploaded(slot=self._slot.index, saved=saved, bytes=total, new=new, seconds=seconds)

    def _write_failed(self, job: _Job, error: str) -> WriteFailed:
        self._failures += 1
        with self._lock:
            if self._offered == (job.step, job.generation.key):
                # Whoever asks for the same one last has it tried again.
                self._offered = (-1, "")
        rest = self._rest_after(self._failures)
        return WriteFailed(slot=self._slot.index, step=job.step, error=error, rest=rest)

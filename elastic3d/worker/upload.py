"""Durable checkpoints, written by keepers from snapshots, beside the training.

An `Uploader` writes one slot's tiles; the leader's `Committer` fences the store for its generation and commits what is
complete. Both have one thread, so that a slow store delays the next checkpoint and nothing else. A failed save never
stops training: it is an event, and the next one begins anew.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

import tenacity

from checkpointing import Store, commit, fence, open_store, read_latest, save_rank
from checkpointing.errors import CheckpointError, Incomplete, StoreError, Superseded
from elastic3d.errors import ConfigurationError, StateError
from elastic3d.membership.records import SavedStep
from elastic3d.values import Generation
from elastic3d.worker.slot import Slot


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A slot's tiles of a step are in the store."""

    slot: int
    saved: SavedStep


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteFailed:
    """A slot's tiles of a step could not be written; the next checkpoint begins anew."""

    slot: int
    step: int
    error: str


def open_checked(url: str) -> tuple[Store, int]:
    """Return the store and the newest generation it knows; ConfigurationError where it cannot be used."""
    try:
        store = open_store(url)
        latest = read_latest(store)
    except (CheckpointError, OSError) as error:
        raise ConfigurationError(f"store={url!r} cannot be used: {error}") from error
    return store, latest.generation if latest is not None else 0


class Uploader:
    """Writes the snapshots of one slot that are meant as checkpoints; `tell` hears what came of each."""

    def __init__(self, store: Store, slot: Slot, tell: Callable[[Written | WriteFailed], None]) -> None:
        self._store = store
        self._slot, self._tell = slot, tell
        self._jobs: queue.SimpleQueue[tuple[int, Generation] | None] = queue.SimpleQueue()
        self._busy = False
        self._offered = (-1, "")
        self._thread = threading.Thread(target=self._run, name=f"upload-{slot.index}", daemon=True)
        self._thread.start()

    def offer(self, step: int, generation: Generation) -> None:
        """Write the pinned snapshot of `step`, made in `generation`; let go of it if the one before is not done."""
        if self._busy or self._offered == (step, generation.key):
            self._slot.unpin(step)
        else:
            self._put(step, generation)

    def flush(self, step: int, generation: Generation) -> None:
        """Write the snapshot of `step`, the last there will be, whatever is being written now."""
        if self._offered != (step, generation.key):
            self._put(step, generation)

    def close(self, patience: float) -> None:
        """Stop; the present write has `patience` seconds to end."""
        self._jobs.put(None)
        self._thread.join(timeout=patience)

    def _put(self, step: int, generation: Generation) -> None:
        self._busy, self._offered = True, (step, generation.key)
        self._jobs.put((step, generation))

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            step, generation = job
            said = self._write(step, generation)
            # Whoever hears that it is done may offer the next.
            self._busy = not self._jobs.empty()
            self._tell(said)

    def _write(self, step: int, generation: Generation) -> Written | WriteFailed:
        saved = SavedStep(step=step, made_in=generation.number, attempt=generation.attempt, world=generation.world)
        try:
            with self._slot.pieces(step) as pinned:
                save_rank(
                    self._store,
                    step=step,
                    made_in=saved.made_in,
                    attempt=saved.attempt,
                    rank=pinned.rank,
                    world=saved.world,
                    pieces=pinned.pieces,
                    facts=dict(pinned.facts),
                )
        except (CheckpointError, StateError, OSError) as error:
            return WriteFailed(slot=self._slot.index, step=step, error=str(error))
        return Written(slot=self._slot.index, saved=saved)


class Committer:
    """The leader's hand in the store. `told` hears of each commit (step, None) or failure (step, error)."""

    def __init__(self, store: Store, told: Callable[[int, str | None], None]) -> None:
        self._store = store
        self._told = told
        self._jobs: queue.SimpleQueue[tuple[SavedStep | None, int] | None] = queue.SimpleQueue()
        self._done: set[SavedStep] = set()
        self._thread = threading.Thread(target=self._run, name="elastic3d-commit", daemon=True)
        self._thread.start()

    def fence(self, number: int) -> None:
        """Put the number into `latest`, so that no older leader can commit any more."""
        self._jobs.put((None, number))

    def commit(self, saved: SavedStep, number: int) -> None:
        """Commit this step in generation `number`, if its manifests are complete."""
        self._jobs.put((saved, number))

    def close(self, patience: float) -> None:
        """Stop; what was asked has `patience` seconds to end."""
        self._jobs.put(None)
        self._thread.join(timeout=patience)

    def _run(self) -> None:
        retry = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type((StoreError, OSError)),
            wait=tenacity.wait_exponential(multiplier=0.1, max=2.0),
            stop=tenacity.stop_after_delay(20.0),
            reraise=True,
        )
        while (job := self._jobs.get()) is not None:
            saved, number = job
            if saved is None:
                try:
                    retry(fence, self._store, number)
                except (CheckpointError, OSError) as error:
                    self._told(-1, f"fence: {error}")
            elif saved not in self._done:
                try:
                    retry(
                        commit,
                        self._store,
                        step=saved.step,
                        made_in=saved.made_in,
                        attempt=saved.attempt,
                        committed_in=number,
                        world=saved.world,
                    )
                    self._done.add(saved)
                    self._told(saved.step, None)
                except (Incomplete, Superseded):
                    pass  # some nodes still write, or a later step was faster
                except (CheckpointError, OSError) as error:
                    self._told(saved.step, str(error))

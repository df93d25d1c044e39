"""How the leader writes to the store: it fences off older leaders, and commits what all ranks have written.

A request stands until it is done or has become pointless: a store that does not answer is tried again at growing
intervals, ranks that are still writing are waited for, and a later save replaces an earlier one. A `latest` that is
damaged is written anew: nothing could be committed any more, and nobody may be there to do it.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from dataclasses import dataclass

from checkpointing import Committed, Distrust, Ref, Store, commit, fence, mark_distrusted, read_latest, repair_latest
from checkpointing.errors import CheckpointError, CommitRefused, Corrupt, Fenced, Incomplete, Superseded
from checkpointing.format import names
from checkpointing.retention.store_clock import modified_at, store_time
from elastic3d import threads
from elastic3d.clock import SYSTEM, Clock
from elastic3d.membership.records import SavedStep

INCOMPLETE_PATIENCE = 30.0
"""Seconds after which ranks that have not written their part are taken never to do so."""

_LONGEST = 5.0  # seconds between two tries


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitDone:
    """A save is a committed checkpoint. seconds: since that was asked for."""

    saved: SavedStep
    committed: Committed
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitFailed:
    """A save was not committed, or the store not fenced (saved: None). again: a retry follows, which is reported once.

    deposed: a newer leader is there.
    """

    saved: SavedStep | None
    error: str
    again: bool
    deposed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitNeedless:
    """The save, or a later one, had already been committed."""

    saved: SavedStep


@dataclass(frozen=True, slots=True, kw_only=True)
class FencedStore:
    """What the store held when it was fenced: steps of `latest`, `verified` and `vetted`, -1 for none, and their ages.

    Ages are in seconds by the store's clock, None where the store does not say.
    """

    step: int
    age: float | None
    verified_step: int
    verified_age: float | None
    vetted_step: int = -1
    vetted_age: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RefRepaired:
    """`latest` was damaged, and has been written anew. checkpoint: the newest one of those that the store holds."""

    checkpoint: str


CommitterEvent = CommitDone | CommitFailed | CommitNeedless | FencedStore | RefRepaired


@dataclass(slots=True, kw_only=True)
class _Task:
    number: int
    since: float
    distrusted: tuple[Distrust, ...] = ()
    tries: int = 0
    due: float = 0.0
    reported: bool = False


class Committer:
    """Commits on a thread of its own, where it calls `report` for each commit that happened or failed."""

    def __init__(
        self,
        store: Store,
        report: Callable[[CommitterEvent], None],
        *,
        patience: float = INCOMPLETE_PATIENCE,
        clock: Clock = SYSTEM,
    ) -> None:
        self._store, self._report, self._patience, self._clock = store, report, patience, clock
        self._jobs: queue.SimpleQueue[tuple[SavedStep | None, int, tuple[Distrust, ...]] | None] = queue.SimpleQueue()
        self._fence: _Task | None = None
        self._saves: dict[SavedStep, _Task] = {}
        self._done: set[SavedStep] = set()
        self._closing = False
        self._trying: tuple[SavedStep | None, _Task] | None = None
        self._thread = threads.start(self._run, name="elastic3d-commit", edge=threads.Edge.AGAIN, failed=self._broken)

    def fence(self, number: int, distrusted: tuple[Distrust, ...] = ()) -> None:
        """Put the number into `latest`, so that no older leader can commit any more, and rules for its checkpoints."""
        self._jobs.put((None, number, distrusted))

    def commit(self, saved: SavedStep, number: int) -> None:
        """Commit this step in generation `number`, once its manifests are complete."""
        self._jobs.put((saved, number, ()))

    def close(self, patience: float) -> None:
        """Finish what was asked for, within `patience` seconds, and stop."""
        self._jobs.put(None)
        self._thread.join(timeout=patience)

    def _run(self) -> None:
        while True:
            self._hear()
            if self._closing and not self._tasks():
                return
            now = self._clock.monotonic()
            if self._fence is not None and now >= self._fence.due:
                self._trying = (None, self._fence)
                self._try_fence(self._fence)
            for saved in sorted(self._saves, key=_order, reverse=True):
                task = self._saves.get(saved)
                if task is not None and now >= task.due:
                    self._trying = (saved, task)
                    self._try_commit(saved, task)
            self._trying = None

    def _broken(self, error: BaseException) -> None:
        """Retry later what failed in a way nobody foresaw; after `close` it is given up."""
        trying, self._trying = self._trying, None
        if trying is not None:
            saved, task = trying
            if saved is not None and saved not in self._saves:
                # It came to an end, of which nobody has heard: whoever waits for it is told again.
                self._jobs.put((saved, task.number, ()))
            self._say(task, saved, f"{type(error).__name__}: {error}", again=True)

    def _hear(self) -> None:
        """Take the next request; wait for one while there is nothing else to do."""
        timeout = None
        if self._tasks():
            timeout = max(0.0, min(task.due for task in self._tasks()) - self._clock.monotonic())
        try:
            job = self._jobs.get(timeout=timeout)
        except queue.Empty:
            return
        if job is None:
            self._closing = True
            return
        saved, number, distrusted = job
        now = self._clock.monotonic()
        if saved is None:
            self._fence = _Task(number=number, since=now, distrusted=distrusted)
        elif saved in self._done:
            self._report(CommitNeedless(saved=saved))
        else:
            self._saves[saved] = _Task(number=number, since=now)

    def _tasks(self) -> list[_Task]:
        return [*self._saves.values(), *([self._fence] if self._fence is not None else [])]

    def _try_fence(self, task: _Task) -> None:
        try:
            ref = fence(self._store, task.number)
            if task.distrusted:
                mark_distrusted(self._store, task.distrusted)
                ref = read_latest(self._store) or ref
            fenced = _fenced_store(self._store, ref)
        except CommitRefused as error:
            self._say(task, None, f"fence: {error}", again=False, deposed=True)
        except (CheckpointError, OSError) as error:
            self._say(task, None, f"fence: {error}", again=True)
            self._repair(task, error)
            return
        else:
            self._report(fenced)
            # It is the same leader that was asked for these, in a generation of its own before this one.
            for pending in self._saves.values():
                pending.number = max(pending.number, task.number)
        self._fence = None

    def _try_commit(self, saved: SavedStep, task: _Task) -> None:
        try:
            committed = commit(
                self._store,
                step=saved.step,
                made_in=saved.made_in,
                attempt=saved.attempt,
                committed_in=task.number,
                world=saved.world,
            )
        except Incomplete as error:
            if self._closing or self._clock.monotonic() - task.since > self._patience:
                self._say(task, saved, str(error), again=False)
                del self._saves[saved]
            else:
                self._later(task)
        except Superseded as error:
            self._superseded(saved, task, error)
        except Fenced as error:
            # A newer leader commits what is there.
            self._say(task, saved, str(error), again=False, deposed=True)
            self._saves.clear()
        except CommitRefused as error:
            self._say(task, saved, str(error), again=False)
            del self._saves[saved]
        except (CheckpointError, OSError) as error:
            self._say(task, saved, str(error), again=True)
            self._repair(task, error)
        else:
            # What is older is superseded by this one; a later one may wait for its next try, or for its ranks.
            over = [other for other in self._saves if _order(other) <= _order(saved)]
            self._done.update(over)
            for other in over:
                del self._saves[other]
            seconds = self._clock.monotonic() - task.since
            self._report(CommitDone(saved=saved, committed=committed, seconds=seconds))

    def _repair(self, task: _Task, error: Exception) -> None:
        """Write `latest` anew if it is damaged and not only one reading of it; the next try goes on from there."""
        if not isinstance(error, Corrupt) or task.tries < 2:
            return
        try:
            read_latest(self._store)
        except Corrupt:
            try:
                ref = repair_latest(self._store, generation=task.number)
            except (CheckpointError, OSError):
                return  # what fails here makes the next try fail as well
            self._report(RefRepaired(checkpoint=ref.checkpoint or ""))
        except (CheckpointError, OSError):
            return

    def _superseded(self, saved: SavedStep, task: _Task, error: Superseded) -> None:
        """Drop a save that `latest` has passed; say so where it was not this job that moved it."""
        try:
            ref = read_latest(self._store)
        except (CheckpointError, OSError) as unread:
            self._say(task, saved, str(unread), again=True)
            return
        del self._saves[saved]
        there = names.parse_checkpoint(ref.checkpoint) if ref is not None else None
        # All saves of one generation are made in one attempt at it.
        if there is not None and there[0].made_in == saved.made_in and there[0].attempt != saved.attempt:
            why = (
                f"{error}. This job did not make that one: it was imported into the job's store. Nothing more is saved "
                f"before step {there[0].step}, and whoever restores gets the imported one: import into a store of its "
                "own"
            )
            self._say(task, saved, why, again=False)
        else:
            self._report(CommitNeedless(saved=saved))

    def _say(self, task: _Task, saved: SavedStep | None, error: str, *, again: bool, deposed: bool = False) -> None:
        if not task.reported or not again:
            self._report(CommitFailed(saved=saved, error=error, again=again, deposed=deposed))
        task.reported = True
        if again:
            self._later(task)

    def _later(self, task: _Task) -> None:
        task.due = self._clock.monotonic() + min(_LONGEST, 0.1 * 2**task.tries)
        task.tries += 1


def _order(saved: SavedStep) -> tuple[int, int, int]:
    """Return what orders saves, oldest first."""
    return saved.made_in, saved.step, saved.attempt


def _fenced_store(store: Store, ref: Ref) -> FencedStore:
    verified = ref.verified.checkpoint if ref.verified is not None else None
    now = store_time(store) if ref.checkpoint is not None else 0.0
    step, age = _age(store, ref.checkpoint, now)
    verified_step, verified_age = _age(store, verified, now)
    vetted_step, vetted_age = _age(store, ref.vetted.checkpoint if ref.vetted is not None else None, now)
    return FencedStore(
        step=step,
        age=age,
        verified_step=verified_step,
        verified_age=verified_age,
        vetted_step=vetted_step,
        vetted_age=vetted_age,
    )


def _age(store: Store, checkpoint: str | None, now: float) -> tuple[int, float | None]:
    parsed = names.parse_checkpoint(checkpoint) if checkpoint is not None else None
    if checkpoint is None or parsed is None:
        return -1, None
    modified = modified_at(store, names.record(checkpoint))
    return parsed[0].step, None if modified is None else max(0.0, now - modified)

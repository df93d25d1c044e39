"""The processes around the production functions: the minimum of a leader, a rank, a reader and a collector.

Each is one process of one generation. They communicate only through `Generation`, the memory of a
generation's processes; those of an older one do not know that a newer one has begun.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import TypeVar

from chaos.commits.contents import facts, pieces
from chaos.commits.invariants import Checker, misread
from chaos.commits.model import ModelStore, Seat
from chaos.commits.schedule import Job
from chaos.commits.turns import Actor
from checkpointing import Checkpoint, SaveOptions, commit, fence, open_checkpoint, read_latest, save_rank
from checkpointing.errors import (
    CheckpointError,
    CommitRefused,
    Fenced,
    NoCheckpoint,
    StoreError,
    Superseded,
)
from checkpointing.format import names
from checkpointing.reading.announcing import reading
from checkpointing.retention.collection import collect
from checkpointing.retention.policy import Retention

T = TypeVar("T")

_TRIES = 4  # of a call that the store failed
_READS = 3
_ANNOUNCED = SaveOptions(announce_after=0.0)
_COLLECTIONS = 5
_BETWEEN = (0.0, 50.0)  # operations from one collection to the next


@dataclass(slots=True)
class Generation:
    """What the processes of one generation know of each other."""

    number: int
    steps: int
    first: int | None = None
    parent: Checkpoint | None = None
    saved: set[tuple[names.Save, int]] = field(default_factory=set)
    begun: list[names.Save] = field(default_factory=list)
    leaders: list[Actor] = field(default_factory=list)
    ranks: list[Actor] = field(default_factory=list)
    committed: list[str] = field(default_factory=list)


class Cast:
    """Makes the actors of a run."""

    def __init__(self, job: Job, store: ModelStore, checker: Checker) -> None:
        self.actors: dict[str, Actor] = {}
        self.generations: dict[int, Generation] = {}
        self._job = job
        self._store = store
        self._checker = checker
        self._calls = itertools.count(1)
        self._seats: dict[str, Seat] = {}
        for number in range(1, job.generations + 1):
            self.generation(number, job.steps, twin=number <= job.twins)
        for number in range(job.readers):
            self._add(f"reader{number}", lambda seat, actor: self._read(seat, actor))
        for number in range(job.slow):
            self._add(f"slow{number}", lambda seat, actor: self._read_slowly(seat, actor))
        for number in range(job.collectors):
            self.collector(f"collector{number}", _COLLECTIONS)

    def generation(self, number: int, steps: int, *, twin: bool = False) -> Generation:
        """Add the processes of a generation."""
        own = self.generations[number] = Generation(number=number, steps=steps)
        own.leaders = [
            self._add(f"{kind}{number}", lambda seat, actor: self._lead(seat, actor, own))
            for kind in ("leader", "twin")[: 1 + twin]
        ]
        # A rank that is killed comes back and saves again what it saves.
        own.ranks = [self._rank(own, rank) for rank in range(self._job.ranks)]
        return own

    def collector(self, name: str, rounds: int) -> Actor:
        """Add a process that collects so many times, with pauses of the given length."""
        return self._add(name, lambda seat, actor: self._collect(seat, actor, rounds))

    def _rank(self, own: Generation, rank: int) -> Actor:
        name = f"rank{own.number}.{rank}"
        return self._add(name, lambda seat, actor: self._save(seat, actor, own, rank), lives=3)

    def seat(self, name: str) -> Seat:
        """Return an actor's store."""
        return self._seats[name]

    def _add(self, name: str, body: Callable[[Seat, Actor], None], *, lives: int = 1) -> Actor:
        seat = self._store.seat(lambda: actor)
        actor = Actor(name, lambda: body(seat, actor), lives=lives)
        self.actors[name], self._seats[name] = actor, seat
        return actor

    # A leader.

    def _lead(self, seat: Seat, me: Actor, own: Generation) -> None:
        try:
            if self._again(seat, lambda: fence(seat, own.number)) is None:
                return
            self._checker.fenced(own.number)
            self._inherit(seat, me, own)
            if own.first is None and not self._begin(seat, own):
                return
            first = own.first
            assert first is not None
            for step in range(first, first + own.steps):
                for attempt in range(self._job.attempts):
                    save = names.Save(step=step, made_in=own.number, attempt=attempt)
                    me.wait(functools.partial(self._settled, own, save))
                    self._commit(seat, me, own, save)
                if own.committed and Random(f"{self._job.seed} parent {step}").random() < 0.6:
                    own.parent = self._again(seat, lambda: self._open(seat)) or own.parent
        except Fenced:
            return

    def _inherit(self, seat: Seat, me: Actor, own: Generation) -> None:
        """Commit what the previous generation saved and did not commit."""
        before = self.generations.get(own.number - 1)
        if before is not None and before.begun:
            self._commit(seat, me, own, max(before.begun, key=lambda save: save.step))

    def _begin(self, seat: Seat, own: Generation) -> bool:
        try:
            latest = self._again(seat, lambda: open_checkpoint(seat))
        except NoCheckpoint:
            own.first = 1
            return True
        if latest is None:
            return False
        own.parent = latest
        own.first = latest.step + 1
        return True

    def _open(self, seat: Seat) -> Checkpoint | None:
        try:
            return open_checkpoint(seat)
        except NoCheckpoint:
            return None

    def _settled(self, own: Generation, save: names.Save) -> bool:
        return all((save, rank) in own.saved or actor.over for rank, actor in enumerate(own.ranks))

    def _commit(self, seat: Seat, me: Actor, own: Generation, save: names.Save) -> None:
        checkpoint = names.checkpoint(save, own.number)
        for _ in range(_TRIES):
            seat.call = next(self._calls)
            try:
                done = commit(
                    seat,
                    step=save.step,
                    made_in=save.made_in,
                    attempt=save.attempt,
                    committed_in=own.number,
                    world=self._job.ranks,
                )
            except CommitRefused as error:
                final = isinstance(error, Fenced | Superseded)
                self._checker.refused(me.name, seat.call, checkpoint, type(error).__name__, for_good=final)
                if isinstance(error, Fenced):
                    raise
                return
            except StoreError:
                continue
            own.committed.append(done.checkpoint)
            self._checker.reported(me.name, done.checkpoint)
            return

    # A rank.

    def _save(self, seat: Seat, me: Actor, own: Generation, rank: int) -> None:
        me.wait(lambda: own.first is not None or all(leader.over for leader in own.leaders))
        if own.first is None:
            return
        for step in range(own.first, own.first + own.steps):
            for attempt in range(self._job.attempts):
                save = names.Save(step=step, made_in=own.number, attempt=attempt)
                if save not in own.begun:
                    own.begun.append(save)
                random = Random(f"{self._job.seed} {save} {rank}")
                # Twice: as a restarted process would that does not know it had saved.
                for _ in range(1 + (random.random() < 0.25)):
                    parent = own.parent if random.random() < 0.8 else None
                    self._save_one(seat, own, save, rank, parent)

    def _save_one(self, seat: Seat, own: Generation, save: names.Save, rank: int, parent: Checkpoint | None) -> None:
        saved = self._again(
            seat,
            lambda: save_rank(
                seat,
                step=save.step,
                made_in=save.made_in,
                attempt=save.attempt,
                rank=rank,
                world=self._job.ranks,
                pieces=pieces(save.made_in, save.step, rank, self._job.ranks),
                facts=facts(save.made_in, save.step),
                # Its own view: reads of the parent are this process's operations.
                parent=parent and dataclasses.replace(parent, store=seat),
                # In other runs nobody announces itself, to test what protects the unannounced too.
                options=_ANNOUNCED if self._job.slow else SaveOptions(),
            ),
        )
        if saved is not None:
            own.saved.add((save, rank))

    # A reader.

    def _read(self, seat: Seat, me: Actor) -> None:
        for _ in range(_READS):
            seat.faults = 0
            checkpoint = ""
            try:
                ref = read_latest(seat)
                if ref is None or ref.checkpoint is None:
                    continue
                checkpoint = ref.checkpoint
                wrong = misread(open_checkpoint(seat, ref))
            except CheckpointError as error:
                if not seat.faults:
                    self._checker.unreadable(me.name, checkpoint, str(error))
                continue
            if wrong:
                self._checker.torn(me.name, checkpoint, wrong)

    def _read_slowly(self, seat: Seat, me: Actor) -> None:
        """Announce a checkpoint and read it again and again, whatever is collected meanwhile."""
        random = Random(f"{self._job.seed} {me.name}")
        leaders = [leader for own in self.generations.values() for leader in own.leaders]
        me.wait(lambda: bool(self._checker.committed) or all(leader.over for leader in leaders))
        for _ in range(2):
            seat.faults = 0
            with contextlib.suppress(CheckpointError), reading(seat, after=0.0) as checkpoint:
                for _ in range(2):
                    self._sleep(me, random.uniform(*_BETWEEN))
                    self._read_again(seat, me, checkpoint)

    def _read_again(self, seat: Seat, me: Actor, checkpoint: Checkpoint) -> None:
        try:
            wrong = misread(checkpoint)
        except CheckpointError as error:
            if not seat.faults:
                self._checker.lost(me.name, checkpoint.name, str(error))
        else:
            if wrong:
                self._checker.torn(me.name, checkpoint.name, wrong)

    # A collector.

    def _collect(self, seat: Seat, me: Actor, rounds: int) -> None:
        random = Random(f"{self._job.seed} {me.name}")
        for _ in range(rounds):
            done = self._again(
                seat,
                lambda: collect(
                    seat,
                    Retention(keep_last=self._job.keep),
                    grace=float(self._job.grace),
                    wait=False,
                    sleep=lambda seconds: self._sleep(me, seconds),
                    clock=lambda: self._store.now,
                ),
            )
            waiting = done.waiting if done is not None else 0.0
            self._sleep(me, max(waiting, random.uniform(*_BETWEEN)))

    def _sleep(self, me: Actor, seconds: float) -> None:
        until = self._store.now + seconds
        self._store.alarms[me.name] = until
        me.wait(lambda: self._store.now >= until)
        del self._store.alarms[me.name]

    def _again(self, seat: Seat, call: Callable[[], T]) -> T | None:
        """Call until the store does not fail; None when it failed too often."""
        for _ in range(_TRIES):
            seat.call = next(self._calls)
            try:
                return call()
            except StoreError:
                continue
        return None

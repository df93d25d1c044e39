"""One slot of a node, as its keeper sees it: it forks trainers, keeps their snapshots and reports what happens."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import queue
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from checkpointing.format.tiles import Piece
from elastic3d import threads
from elastic3d.health.options import Watching
from elastic3d.health.watch import SlotWatch, Taken
from elastic3d.log import process_log
from elastic3d.port import Assignment, Go
from elastic3d.snapshots import memory
from elastic3d.snapshots.lending import Lender
from elastic3d.snapshots.memory import SnapshotMemory, Stored
from elastic3d.snapshots.replicate import Replicator
from elastic3d.snapshots.server import TileServer
from elastic3d.trust.credentials import Credentials
from elastic3d.worker.processes import spawn
from elastic3d.worker.processes.events import ConnectionRefused, RankMoving, RankSilent, SlotEvent
from elastic3d.worker.processes.loop import SlotLoop
from elastic3d.worker.processes.supervisor import TemplateSupervisor
from elastic3d.worker.processes.trainer import Entry, run_trainer


@dataclass(frozen=True, slots=True, kw_only=True)
class PinnedSnapshot:
    """A snapshot that does not change while the context that gave it is open.

    facts: as the trainer passed them. pieces: its tiles with their digests, as a save takes them.
    """

    generation: int
    step: int
    rank: int
    world: int
    facts: Mapping[str, Any]
    pieces: Sequence[Piece]


class SlotPort(Protocol):
    """What a keeper may ask of a slot, its own (`LocalSlot`) or a companion keeper's (`RemoteSlot`).

    Any thread may call any method, and all but `pieces` and `close` return at once. Results arrive as events
    (worker/processes/events.py) in the queue the slot was created with.
    """

    index: int

    @property
    def pid(self) -> int:
        """The pid of the keeper that has the slot."""
        ...

    @property
    def tile_port(self) -> int:
        """TCP port of the slot's tile server."""
        ...

    @property
    def lender(self) -> str:
        """Abstract name of the socket where the slot's memory is lent to the trainers of this node."""
        ...

    def measure(self, assignment: Assignment) -> int:
        """Fork a trainer that reports the model's profile and ends; return its number."""
        ...

    def prepare(self, assignment: Assignment) -> int:
        """Fork a trainer now, beside any that runs; it builds everything and waits. Return its number."""
        ...

    def go(self, trainer: int, go: Go) -> None:
        """Let a prepared trainer restore and train; may be sent before it is prepared."""
        ...

    def ask_leave(self, trainer: int) -> None:
        """Raise the trainer's leave flag: the next step vote makes all ranks leave together."""
        ...

    def follow(self, trainer: int, on: bool) -> None:
        """Report what the trainer is at (`RankSilent`) though it is not silent, whenever that changes; or no longer."""
        ...

    def set_etcd_away(self, away: bool) -> None:
        """Set the flag every running and future trainer of this slot carries into the step vote."""
        ...

    def set_ready(self, ready: bool) -> None:
        """Set whether another checkpoint would be taken; a snapshot taken for one sets it to False."""
        ...

    def stop(self, trainer: int) -> None:
        """SIGKILL the trainer's whole process group; `TrainerExited` follows when it is reaped."""
        ...

    def stop_all(self) -> None:
        """`stop` every trainer."""
        ...

    def set_buddy(self, address: str | None) -> None:
        """Copy snapshots to the tile server at "host:port" from now on; None: home alone counts as held."""
        ...

    def set_generation(self, number: int) -> None:
        """Refuse replicas of any older generation from now on. Never goes back."""
        ...

    def set_credentials(self, credentials: Credentials) -> None:
        """Show these to other nodes, and serve those that hold the same secret; before the first call none is
        served."""
        ...

    def sealed(self, generation: int, ranks: Sequence[str]) -> None:
        """Take replicas of a generation from these nodes: the `Node.id` of each rank, as its sealed record says."""
        ...

    def pieces(self, step: int) -> AbstractContextManager[PinnedSnapshot]:
        """Pin the newest home snapshot of `step` while the context is open; StateError if it is not held.

        This replaces the pin that `SnapshotTaken(checkpoint=True)` announced. Only one pin at a time.
        """
        ...

    def unpin(self, step: int) -> None:
        """Let go of a snapshot taken for a checkpoint without writing it."""
        ...

    def close(self) -> None:
        """Kill trainers and template, reap them, stop the server and the threads. Idempotent."""
        ...


class LocalSlot:
    """The keeper's own slot. To be created on the main thread, before the process has another one.

    Holds the template, the running trainers, the snapshots' memory, the tile server and the replicator. One thread
    (`slot-N`) owns the template and the trainers; callers post to it.
    """

    def __init__(
        self,
        *,
        index: int,
        host: str,
        entry: Entry,
        events: queue.SimpleQueue[SlotEvent],
        replica_bytes: int | None = None,
        health: Watching | None = None,
        taken: Callable[[Taken], None] = lambda taken: None,
        moved: Callable[[int], None] = lambda trainer: None,
    ) -> None:
        """Fork the template, then start the threads.

        host: the node's address, where tiles are served. replica_bytes: memory that other nodes' snapshots may take
        here in all, None for no limit. entry: what a trainer runs, given its port; a new interpreter gets it by running
        the script again up to `elastic3d.run` (see `serve_role`). health: how trainers with a progress record are
        watched, None for not at all. taken: called, on the watch's thread, with what was taken of a silent one; moved:
        with its number when it moves again.
        """
        self.index = index
        self._numbers = itertools.count(1)
        # Before there is any descriptor that the template would inherit.
        supervisor = TemplateSupervisor(functools.partial(run_trainer, entry))
        self._memory = SnapshotMemory(replica_bytes=replica_bytes)
        self._watch = None

        def moves(trainer: int) -> None:
            events.put(RankMoving(slot=index, trainer=trainer))
            moved(trainer)

        if health is not None:
            self._watch = SlotWatch(
                watching=health,
                silent=lambda trainer, rank, over: events.put(
                    RankSilent(slot=index, trainer=trainer, rank=rank, over=over)
                ),
                moving=moves,
                taken=taken,
                unreadable=lambda why: process_log().emit("rank.unwatched", error=why),
            )
        self._loop = loop = SlotLoop(
            index=index, supervisor=supervisor, memory=self._memory, events=events, watch=self._watch
        )
        self._server = TileServer(
            self._memory,
            host=host,
            refused=lambda refusal: events.put(ConnectionRefused(slot=index, refusal=refusal)),
            name=f"tiles-{index}",
        )
        self._lender = Lender(
            self._memory,
            returned=lambda: loop.post(loop.grant),
            refused=lambda refusal: events.put(ConnectionRefused(slot=index, refusal=refusal)),
            name=f"lender-{index}",
        )
        self._replicator = Replicator(
            self._memory,
            digested=lambda mark: loop.post(lambda: loop.digested(mark)),
            altered=lambda *altered: loop.post(lambda: loop.altered(*altered)),
            ended=lambda *ended: loop.post(lambda: loop.replicated(*ended)),
            unreachable=lambda *unreached: loop.post(lambda: loop.unreachable(*unreached)),
            name=f"replicator-{index}",
        )
        self._thread = threads.start(loop.run, name=f"slot-{index}", edge=threads.Edge.ALONE)
        if self._watch is not None:
            threads.start(self._watch.run, name=f"watch-{index}", edge=threads.Edge.AGAIN)

    @property
    def pid(self) -> int:
        """The pid of this process."""
        return os.getpid()

    @property
    def tile_port(self) -> int:
        """TCP port of the slot's tile server."""
        return self._server.port

    @property
    def lender(self) -> str:
        """Abstract name of the socket where the slot's memory is lent."""
        return self._lender.name

    def measure(self, assignment: Assignment, *, trainer: int | None = None) -> int:
        """Fork a trainer that reports the model's profile and ends; return its number."""
        assert assignment.measuring
        return self.prepare(assignment, trainer=trainer)

    def prepare(self, assignment: Assignment, *, trainer: int | None = None) -> int:
        """Fork a trainer now, beside any that runs; return its number. trainer: the number a proxy has chosen."""
        number = next(self._numbers) if trainer is None else trainer
        self._loop.post(lambda: self._loop.prepare(number, assignment))
        return number

    def go(self, trainer: int, go: Go) -> None:
        """Let a prepared trainer restore and train."""
        self._loop.post(lambda: self._loop.go(trainer, go))

    def ask_leave(self, trainer: int) -> None:
        """Raise the trainer's leave flag."""
        self._loop.post(lambda: self._loop.ask_leave(trainer))

    def follow(self, trainer: int, on: bool) -> None:
        """Report what the trainer is at, or no longer."""
        if self._watch is not None:
            self._watch.follow(trainer, on)

    def set_etcd_away(self, away: bool) -> None:
        """Set the flag every trainer of this slot carries into the step vote."""
        self._loop.post(lambda: self._loop.set_etcd_away(away))

    def set_ready(self, ready: bool) -> None:
        """Say whether another checkpoint would be taken."""
        self._loop.post(lambda: self._loop.set_ready(ready))

    def stop(self, trainer: int) -> None:
        """SIGKILL the trainer's whole process group."""
        self._loop.post(lambda: self._loop.stop(trainer))

    def stop_all(self) -> None:
        """`stop` every trainer."""
        self._loop.post(self._loop.stop_all)

    def set_buddy(self, address: str | None) -> None:
        """Copy snapshots to the tile server at "host:port" from now on."""
        self._replicator.set_buddy(address)

    def set_generation(self, number: int) -> None:
        """Refuse replicas of any older generation from now on."""
        self._memory.set_generation(number)

    def set_credentials(self, credentials: Credentials) -> None:
        """Show these to other nodes, and serve who holds the same secret."""
        self._server.set_credentials(credentials)
        self._replicator.set_credentials(credentials)

    def sealed(self, generation: int, ranks: Sequence[str]) -> None:
        """Take replicas of a generation from these nodes."""
        self._server.sealed(generation, ranks)

    @contextlib.contextmanager
    def pieces(self, step: int) -> Iterator[PinnedSnapshot]:
        """Pin the newest home snapshot of `step` while the context is open; StateError if it is not held."""
        with self.segment(step) as (stored, _):
            yield PinnedSnapshot(
                generation=stored.mark.generation,
                step=step,
                rank=stored.rank,
                world=stored.world,
                facts=stored.facts,
                pieces=memory.pieces(stored.table, stored.data, stored.digest_all()),
            )

    @contextlib.contextmanager
    def segment(self, step: int) -> Iterator[tuple[Stored, int]]:
        """Pin as `pieces` does, and yield the snapshot and the descriptor of its memory."""
        try:
            with self._memory.pinned(step) as stored:
                yield stored, self._memory.descriptor_of(stored)
        finally:
            self._loop.post(self._loop.grant)

    def unpin(self, step: int) -> None:
        """Let go of a snapshot taken for a checkpoint without writing it."""
        self._memory.unpin(step)
        self._loop.post(self._loop.grant)

    def close(self) -> None:
        """Kill trainers and template, reap them, stop the server and the threads. Idempotent."""
        self._loop.post(self._loop.end)
        self._thread.join()
        if self._watch is not None:
            self._watch.close()
        self._server.close()
        self._lender.close()
        self._replicator.close()


def serve_role(entry: Entry) -> None:
    """Become the template or the trainer this interpreter was started to be; return if it was started as neither.

    `elastic3d.run` calls it before it looks at anything else. entry: as for `LocalSlot`.
    """
    spawn.serve_role_from_environment(functools.partial(run_trainer, entry))

"""The trainers of a node, generation by generation: started beside each other, told to go, told to leave, stopped.

The membership decides what ought to run, and hears what became of it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from elastic3d.clock import SYSTEM, Clock
from elastic3d.membership import events as m
from elastic3d.membership import topology
from elastic3d.port import Go
from elastic3d.rendezvous.settings import Settings
from elastic3d.trust.credentials import Credentials
from elastic3d.values import Generation, Node
from elastic3d.worker import events as w
from elastic3d.worker.failure import words
from elastic3d.worker.figures import Figures
from elastic3d.worker.journal import Journal
from elastic3d.worker.options import Options
from elastic3d.worker.slot import Slot
from elastic3d.worker.world import World, assignment

TrainerEvent = w.Started | w.Prepared | w.Restored | w.StepCommitted | w.TrainerExited


class Generations:
    """Worlds by their generation's key. running: the generation that was told to go last. finished: `main` returned.

    tell: what the membership hears. credentials: what the node's processes show to those of the others, once it joined.
    """

    def __init__(
        self,
        settings: Settings,
        options: Options,
        slots: Sequence[Slot],
        tell: Callable[[m.Event], None],
        *,
        journal: Journal,
        figures: Figures,
        clock: Clock = SYSTEM,
    ) -> None:
        self._settings, self._options, self._slots, self._tell = settings, options, slots, tell
        self._journal, self._figures, self._clock = journal, figures, clock
        self.worlds: dict[str, World] = {}
        self.running: Generation | None = None
        self.buddy: Node | None = None
        self.finished = False
        self.credentials: Credentials | None = None

    def show(self, credentials: Credentials) -> None:
        """Have the slots, and the trainers to come, show these credentials, and take others of the same run."""
        self.credentials = credentials
        for slot in self._slots:
            slot.set_credentials(credentials)

    def sealed(self, generation: Generation) -> None:
        """Take replicas of a generation from those of whom its record says that they are theirs."""
        ranks = tuple(node.id for node in generation.nodes for _ in node.slots)
        for slot in self._slots:
            slot.sealed(generation.number, ranks)

    def prepare(self, generation: Generation, me: Node) -> None:
        """Fork the trainers of a generation; they build everything and wait."""
        first = generation.first_rank(me.name, me.incarnation)
        assert first is not None
        trainers = {}
        for slot in self._slots:
            rank = first + slot.index
            told = assignment(
                self._settings,
                self._options,
                slot=slot.index,
                rank=rank,
                generation=generation,
                credentials=self.credentials,
            )
            trainers[slot.index] = slot.prepare(told)
        self.worlds[generation.key] = World(generation=generation, first_rank=first, trainers=trainers)

    def go(self, generation: Generation, me: Node) -> None:
        """Let the prepared trainers of a generation restore and train."""
        world = self.worlds[generation.key]
        servers = tuple(
            f"{node.address}:{place.tile_port}"
            for node in (*generation.nodes, *generation.spares)
            for place in node.slots
        )
        at = next(i for i, node in enumerate(generation.nodes) if node.name == me.name)
        buddy = generation.nodes[topology.buddies(generation.nodes)[at]]
        self.running = generation
        self.sealed(generation)
        for slot in self._slots:
            slot.set_generation(generation.number)
        self.keep_with(buddy if buddy.id != me.id else None)
        for slot in self._slots:
            slot.go(world.trainers[slot.index], Go(servers=servers))

    def keep_with(self, buddy: Node | None) -> None:
        """Have the snapshots copied to `buddy` from now on, those included that only another has."""
        self.buddy = buddy
        for world in self.worlds.values():
            world.held.clear()
        for slot in self._slots:
            slot.set_buddy(f"{buddy.address}:{buddy.slots[slot.index].tile_port}" if buddy is not None else None)

    def trainers(self, key: str) -> list[tuple[Slot, int]]:
        """Return the living trainers of a generation, with their slots."""
        world = self.worlds.get(key)
        if world is None:
            return []
        return [(self._slots[i], trainer) for i, trainer in world.trainers.items() if i not in world.ended]

    def stop(self, key: str) -> None:
        """Kill the trainers of a generation."""
        world = self.worlds.get(key)
        if world is not None:
            world.stopping = True
            for slot, trainer in self.trainers(key):
                slot.stop(trainer)

    def forget(self) -> None:
        """Kill all trainers and begin anew under another incarnation; what the slots hold in memory stays."""
        for slot in self._slots:
            slot.stop_all()
        self.worlds.clear()
        self.running = None

    def find(self, slot: int, trainer: int) -> tuple[str, World] | None:
        """Return the world of a slot's trainer, with its key."""
        return next(((k, v) for k, v in self.worlds.items() if v.trainers.get(slot) == trainer), None)

    def held(self, event: w.SnapshotHeld) -> None:
        """Take note of what is at home and at the buddy."""
        self._journal.emit("snapshot.held", step=event.step, slot=event.slot, generation=event.generation)
        for world in self.worlds.values():
            if world.generation.number == event.generation:
                world.held[event.slot] = max(event.step, world.held.get(event.slot, -1))

    def heard(self, event: TrainerEvent) -> None:
        """Take note of what a trainer did."""
        found = self.find(event.slot, event.trainer)
        if found is None:
            return
        key, world = found
        rank = world.first_rank + event.slot
        match event:
            case w.Prepared():
                world.prepared.add(event.slot)
                if len(world.prepared) == len(self._slots):
                    self._tell(m.Prepared(key=key))
                return
            case w.StepCommitted() if event.slot == 0:
                record = event.record
                self._figures.stepped(record, self._clock.monotonic())
                self._tell(m.Progress(step=record.step, etcd_away=record.etcd_away_everywhere))
            case w.TrainerExited():
                self._exited(event, key, world, rank)
            case _:
                pass
        self._journal.trainer(event, world.generation.number, rank)

    def _exited(self, event: w.TrainerExited, key: str, world: World, rank: int) -> None:
        world.ended[event.slot] = event.step
        match event.kind:
            case w.ExitKind.DONE:
                if world.over:
                    self.finished = True
                    self._tell(m.Finished(key=key))
            case w.ExitKind.LEFT:
                world.leaving_since = self._clock.monotonic()
            case w.ExitKind.STOPPED:
                pass
            case w.ExitKind.PEER_LOST:
                self._tell(m.Interrupted(key=key))
                self.stop(key)
            case w.ExitKind.USER_ERROR:
                said = words(event, self._settings.node, rank)
                sys.stderr.write(f"elastic3d: {said}\n")
                self._tell(m.Faulted(key=key, detail=said, error=True))
                self.stop(key)
            case _:
                detail = f"trainer of rank {rank} ended by {event.kind}: {event.detail or event.code}"
                if not world.stopping:
                    self._tell(m.Faulted(key=key, detail=detail))
                self.stop(key)
        if world.over and world.leaving_since is None:
            self.worlds.pop(key, None)

"""The first keeper of a node: it speaks for the node, and brings the trainers of its slots to where they should be.

Everything that happens arrives in one queue and is handled on the main thread: events of the slots, actions of the
membership, signals. The membership decides what ought to run; this module starts, tells and stops it.
"""

from __future__ import annotations

import os
import queue
import secrets
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from checkpointing import Store
from elastic3d import notices
from elastic3d.admission.check import Check
from elastic3d.clock import SYSTEM
from elastic3d.errors import Elastic3dError, JobEnded, MembershipError, TrainingFailed
from elastic3d.etcd import EtcdClient
from elastic3d.membership import events as m
from elastic3d.membership import topology
from elastic3d.membership.driver.links import Links
from elastic3d.membership.driver.member import Member
from elastic3d.membership.records import MemberRecord, Notice, Pulse, SavedStep
from elastic3d.planner import Plan, plan
from elastic3d.port import Go
from elastic3d.rendezvous.connect import connect
from elastic3d.rendezvous.settings import Settings
from elastic3d.values import Generation, Layout, ModelProfile, Node
from elastic3d.values import Slot as Place
from elastic3d.worker import departure
from elastic3d.worker import events as w
from elastic3d.worker.admit import admit
from elastic3d.worker.departure import Departure
from elastic3d.worker.figures import Figures
from elastic3d.worker.journal import Journal
from elastic3d.worker.options import Options
from elastic3d.worker.slot import Slot
from elastic3d.worker.upload import Committer, Uploader, WriteFailed, Written, open_checked
from elastic3d.worker.world import World, assignment

HELD_PATIENCE = 2.0
"""Seconds a planned change waits for the last snapshot to be at the buddy, on a node that stays."""
LAST_PATIENCE = 10.0
"""The same for one that nobody takes over from memory, and that is written to the store."""
CLOSE_PATIENCE = 10.0
"""Seconds that writes to the store have to end when a node that is in no hurry leaves."""


@dataclass(frozen=True, slots=True)
class Signalled:
    """A signal reached the keeper."""

    number: int


@dataclass(frozen=True, slots=True)
class EtcdHeard:
    """Whether etcd answers has changed."""

    there: bool


@dataclass(frozen=True, slots=True)
class Proposed:
    """The membership to come, None while there is none."""

    generation: Generation | None


Inbox = queue.SimpleQueue[Any]


class Keeper:
    """One node's membership and its slots. `slots` in local order, all putting their events into `inbox`."""

    def __init__(self, settings: Settings, options: Options, slots: Sequence[Slot], inbox: Inbox) -> None:
        self._settings, self._options, self._slots, self._inbox = settings, options, list(slots), inbox
        self._journal = Journal(options.events, settings.run_id, settings.node)
        self._worlds: dict[str, World] = {}
        self._member: Member | None = None
        self._store: Store | None = None
        self._committer: Committer | None = None
        self._uploaders: list[Uploader] = []
        self._exit: m.Exit | None = None
        self._last_saved: dict[int, SavedStep] = {}
        self._finished = False
        self._computed: tuple[Check, ...] = ()
        self._signal_heeded = False
        self._departure = Departure()
        self._figures = Figures()
        self._proposed: Generation | None = None
        self._running: Generation | None = None
        self._buddy: Node | None = None

    def run(self) -> None:
        """Take part until the job or this node's part in it is over; errors say why it failed."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, _frame: self._inbox.put(Signalled(number)))
        floor = 0
        if self._options.store is not None:
            self._store, floor = open_checked(self._options.store)
        profile = self._profile = self._measure()
        # What no number of nodes could train is said before anybody waits for more of them.
        self._plan(min(self._settings.policy.maximum, profile.blocks * profile.micro_batches), profile)
        self._wait_at_gate()
        if self._exit is None:
            if self._settings.admission:
                admit(self._settings, self._options, profile, self._computed, self._journal)
            self._take_part(profile, floor)

    # Before joining.

    def _measure(self) -> ModelProfile:
        """Run `main` up to `run.restore` with the model on meta; what is wrong with it shows here."""
        places = len(self._slots) if self._settings.admission else 0
        self._slots[0].measure(assignment(self._settings, self._options, slot=0, places=places))
        profile: ModelProfile | None = None
        while True:
            match self._inbox.get():
                case w.Measured() as event:
                    profile, self._computed = event.profile, event.checks
                case w.TrainerExited(kind=w.ExitKind.MEASURED) if profile is not None:
                    return profile
                case w.TrainerExited(kind=w.ExitKind.USER_ERROR) as event:
                    raise TrainingFailed(_words(event, self._settings.node, 0))
                case w.TrainerExited() as event:
                    raise TrainingFailed(f"the measuring trainer ended without a profile: {event.kind} {event.detail}")
                case w.SlotLost() as event:
                    raise MembershipError(f"slot {event.slot} is lost: {event.detail}")
                case Signalled() as event:
                    raise MembershipError(f"ended by {signal.Signals(event.number).name} before it joined")
                case _:
                    pass

    def _plan(self, nodes: int, profile: ModelProfile) -> Plan:
        return plan(nodes, len(self._slots), profile, self._options.layout or Layout())

    def _wait_at_gate(self) -> None:
        """Stay warm until the file is there: a spare that joins at a word."""
        while self._settings.gate and not os.path.exists(self._settings.gate):
            try:
                event = self._inbox.get(timeout=0.02)
            except queue.Empty:
                continue
            if isinstance(event, Signalled):
                self._exit = m.Exit(failed=False, detail="ended at the gate")
                return

    # Taking part.

    def _take_part(self, profile: ModelProfile, floor: int) -> None:
        from torch._C._distributed_c10d import TCPStore

        client = connect(self._settings)
        links = Links(self._settings.address, lambda event: self._hear_peer(event))
        store = TCPStore(self._settings.address, 0, is_master=True, wait_for_workers=False, use_libuv=True)
        node = Node(
            name=self._settings.node,
            incarnation=secrets.token_hex(6),
            address=self._settings.address,
            slots=tuple(Place(tile_port=slot.tile_port) for slot in self._slots),
            heartbeat_port=links.port,
            store_port=store.port,
            labels=self._settings.labels,
            home=self._settings.home,
        )
        policy = self._settings.policy
        record = MemberRecord(node=node, profile=profile, floor=floor, minimum=policy.minimum, maximum=policy.maximum)
        if self._store is not None:
            self._committer = Committer(self._store, self._committed)
            self._uploaders = [Uploader(self._store, slot, self._inbox.put) for slot in self._slots]
        self._join(client, links, record)
        watcher = None
        try:
            watcher = notices.watch(self._settings.notices, self._inbox.put)
            while self._exit is None:
                self._handle(self._next())
                if self._exit is not None and self._exit.rejoin and not self._departure.told:
                    self._rejoin(client, links, record)
            if watcher is not None and not self._exit.failed:
                watcher.acknowledge()
        finally:
            if watcher is not None:
                watcher.close()
            for slot in self._slots:
                slot.stop_all()
            for uploader in self._uploaders:
                uploader.close(self._close_patience())
            assert self._member is not None
            self._member.close()
            links.close()
            if self._committer is not None:
                self._committer.close(self._close_patience())
            client.close()
            del store
        self._end()

    def _join(self, client: EtcdClient, links: Links, record: MemberRecord, *, again: bool = False) -> None:
        self._node = record.node
        self._member = Member(
            client,
            self._settings.root,
            record,
            self._settings.policy,
            lambda nodes, mine: self._plan(nodes, mine.profile or self._profile),
            self._inbox.put,
            pulse=self._pulse,
            heard=lambda there: self._inbox.put(EtcdHeard(there)),
            noted=self._noted,
        )
        self._member.start(links, again=again)
        self._journal.emit("member.joined", incarnation=record.node.incarnation)

    def _rejoin(self, client: EtcdClient, links: Links, record: MemberRecord) -> None:
        """Come back as a newcomer after the others put this node out; what the slots hold in memory stays."""
        assert self._exit is not None
        assert self._member is not None
        self._journal.emit("member.fenced", incarnation=self._node.incarnation, detail=self._exit.detail)
        for slot in self._slots:
            slot.stop_all()
        self._worlds.clear()
        self._last_saved.clear()
        self._proposed = self._running = self._exit = None
        self._member.close()
        node = replace(record.node, incarnation=secrets.token_hex(6))
        self._join(client, links, replace(record, node=node), again=True)

    def _pulse(self) -> Pulse:
        """Say how this node is; on the member's writing thread."""
        running = self._running
        state = "draining" if self._departure.told else "active" if running is not None else "spare"
        return self._figures.pulse(state, running.number if running is not None else 0, SYSTEM.monotonic())

    def _end(self) -> None:
        assert self._exit is not None
        kind = "error" if self._exit.failed else "done"
        self._journal.emit("job.ended", kind=kind, error=self._exit.detail or None)
        self._journal.close()
        if self._exit.failed:
            raise JobEnded(self._exit.detail)

    def _next(self) -> object:
        """Return the next thing to handle; None when only time has passed while this node or its trainers leave."""
        leaving = any(world.leaving_since is not None for world in self._worlds.values())
        draining = self._departure.deadline is not None
        try:
            return self._inbox.get(timeout=0.02 if leaving else 0.2 if draining else None)
        except queue.Empty:
            return None

    def _handle(self, event: object) -> None:
        match event:
            case m.Prepare():
                self._prepare(event.generation)
            case m.Go():
                self._go(event)
            case m.AskLeave():
                self._ask_leave(event.key)
            case m.Stop():
                self._stop(event.key)
            case m.Fence():
                if self._committer is not None:
                    self._committer.fence(event.number)
            case m.Commit():
                if self._committer is not None:
                    self._committer.commit(event.saved, event.number)
            case m.Exit():
                self._exit = event
            case m.Draining():
                self._drain(event.seconds, event.detail)
            case notices.Notice():
                self._heed(Notice(kind=str(event.kind), seconds=event.seconds, detail=event.detail))
            case Signalled():
                self._signalled(0, event.number)
            case w.SlotSignalled():
                self._signalled(event.slot, event.number)
            case Proposed():
                self._proposed = event.generation
                self._take_refuge()
            case EtcdHeard():
                self._etcd_heard(event.there)
            case _:
                self._handle_slot(event)
        self._check_left()
        if self._departure.over(SYSTEM.monotonic()):
            self._leave_at_once("its time to leave is up")

    def _tell(self, event: m.Event) -> None:
        assert self._member is not None
        self._member.tell(event)

    # Leaving.

    def _signalled(self, slot: int, number: int) -> None:
        name = signal.Signals(number).name
        if self._departure.signalled(slot):
            self._leave_at_once(f"a second {name}")
        elif not self._signal_heeded:
            self._signal_heeded = True
            self._heed(Notice(kind="signal", seconds=self._settings.drain, detail=name))

    def _heed(self, notice: Notice) -> None:
        """Have the node drained: the leader forms a membership without it."""
        self._drain(notice.seconds, f"{notice.kind}: {notice.detail}")
        self._tell(m.Noticed(notice=replace(notice, at=SYSTEM.wall())))

    def _drain(self, seconds: float | None, detail: str) -> None:
        if self._departure.within(seconds, SYSTEM.monotonic()):
            self._journal.emit("node.draining", seconds=seconds, detail=detail)

    def _leave_at_once(self, why: str) -> None:
        """Leave with whatever the trainers are doing, once."""
        if not self._departure.at_once:
            self._departure.at_once = True
            self._journal.emit("node.leaving", detail=why)
            self._tell(m.LeaveAsked())

    def _close_patience(self) -> float:
        """Return how many seconds writes to the store still have when this node's part is over."""
        if self._exit is None or self._exit.failed:
            return 0.0
        now = SYSTEM.monotonic()
        return max(0.0, self._departure.waits_until(now, CLOSE_PATIENCE) - now)

    def _noted(self, event: m.Event) -> None:
        """Hear what the watch says, on the member's thread."""
        self._journal.noted(event)
        match event:
            case m.ProposalPut():
                self._inbox.put(Proposed(event.proposal.generation))
            case m.ProposalGone():
                self._inbox.put(Proposed(None))
            case m.Listed(tier=m.Tier.BOARD):
                found = [item.proposal.generation for item in event.items if isinstance(item, m.ProposalPut)]
                self._inbox.put(Proposed(found[0] if found else None))
            case _:
                pass

    def _take_refuge(self) -> None:
        if self._proposed is not None and self._running is not None:
            refuge = departure.refuge(self._node, self._buddy, self._running, self._proposed)
            if refuge is not None:
                self._keep_with(refuge)

    def _keep_with(self, buddy: Node | None) -> None:
        """Have the snapshots copied to `buddy` from now on, those included that only another has."""
        self._buddy = buddy
        for world in self._worlds.values():
            world.held.clear()
        for slot in self._slots:
            slot.set_buddy(f"{buddy.address}:{buddy.slots[slot.index].tile_port}" if buddy is not None else None)

    def _ask_leave(self, key: str) -> None:
        world = self._worlds.get(key)
        if world is not None:
            # With nobody to take over the job stops, or waits for nodes that may not come.
            world.last = self._store is not None and (self._proposed is None or not self._proposed.nodes)
        for slot, trainer in self._world_trainers(key):
            slot.ask_leave(trainer)

    def _flush(self, world: World) -> None:
        """Write what the trainers left to the store: no checkpoint may have been due at that step."""
        world.flushing = True
        made = (world.step, world.generation.number, world.generation.attempt)
        for slot, saved in self._last_saved.items():
            if (saved.step, saved.made_in, saved.attempt) == made:
                world.flushed.add(slot)
        for uploader in self._uploaders:
            uploader.flush(world.step, world.generation)

    def _prepare(self, generation: Generation) -> None:
        first = generation.first_rank(self._node.name, self._node.incarnation)
        assert first is not None
        trainers = {}
        for slot in self._slots:
            rank = first + slot.index
            told = assignment(self._settings, self._options, slot=slot.index, rank=rank, generation=generation)
            trainers[slot.index] = slot.prepare(told)
        self._worlds[generation.key] = World(generation=generation, first_rank=first, trainers=trainers)

    def _go(self, action: m.Go) -> None:
        generation = action.generation
        world = self._worlds[generation.key]
        servers = tuple(
            f"{node.address}:{place.tile_port}"
            for node in (*generation.nodes, *generation.spares)
            for place in node.slots
        )
        at = next(i for i, node in enumerate(generation.nodes) if node.name == self._node.name)
        buddy = generation.nodes[topology.buddies(generation.nodes)[at]]
        self._running = generation
        for slot in self._slots:
            slot.set_generation(generation.number)
        self._keep_with(buddy if buddy.id != self._node.id else None)
        for slot in self._slots:
            slot.go(world.trainers[slot.index], Go(servers=servers))

    def _world_trainers(self, key: str) -> list[tuple[Slot, int]]:
        world = self._worlds.get(key)
        if world is None:
            return []
        return [(self._slots[i], trainer) for i, trainer in world.trainers.items() if i not in world.ended]

    def _stop(self, key: str) -> None:
        world = self._worlds.get(key)
        if world is not None:
            world.stopping = True
            for slot, trainer in self._world_trainers(key):
                slot.stop(trainer)

    def _find(self, slot: int, trainer: int) -> tuple[str, World] | None:
        return next(((k, v) for k, v in self._worlds.items() if v.trainers.get(slot) == trainer), None)

    # What the slots say.

    def _handle_slot(self, event: object) -> None:
        match event:
            case w.SlotLost():
                self._exit = m.Exit(failed=True, detail=f"slot {event.slot} is lost: {event.detail}")
            case Written():
                self._saved(event)
            case WriteFailed():
                self._flushed(event.slot, event.step)
                self._figures.failed(event.step, event.error)
                self._journal.emit("checkpoint.failed", step=event.step, error=event.error, slot=event.slot)
            case w.SnapshotTaken(checkpoint=True):
                found = self._find(event.slot, event.trainer)
                if found is not None and self._uploaders:
                    self._uploaders[event.slot].offer(event.step, found[1].generation)
                else:
                    self._slots[event.slot].unpin(event.step)
            case w.SnapshotHeld():
                self._journal.emit("snapshot.held", step=event.step, slot=event.slot, generation=event.generation)
                for world in self._worlds.values():
                    if world.generation.number == event.generation:
                        world.held[event.slot] = max(event.step, world.held.get(event.slot, -1))
            case w.Started() | w.Prepared() | w.Restored() | w.StepCommitted() | w.TrainerExited():
                found = self._find(event.slot, event.trainer)
                if found is not None:
                    self._handle_trainer(event, *found)
            case _:
                pass

    def _handle_trainer(
        self,
        event: w.Started | w.Prepared | w.Restored | w.StepCommitted | w.TrainerExited,
        key: str,
        world: World,
    ) -> None:
        rank = world.first_rank + event.slot
        match event:
            case w.Prepared():
                world.prepared.add(event.slot)
                if len(world.prepared) == len(self._slots):
                    self._tell(m.Prepared(key=key))
                return
            case w.StepCommitted() if event.slot == 0:
                record = event.record
                self._figures.stepped(record, SYSTEM.monotonic())
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
                    self._finished = True
                    self._tell(m.Finished(key=key))
            case w.ExitKind.LEFT:
                world.leaving_since = SYSTEM.monotonic()
            case w.ExitKind.STOPPED:
                pass
            case w.ExitKind.PEER_LOST:
                self._tell(m.Interrupted(key=key))
                self._stop(key)
            case w.ExitKind.USER_ERROR:
                words = _words(event, self._settings.node, rank)
                sys.stderr.write(f"elastic3d: {words}\n")
                self._tell(m.Faulted(key=key, detail=words, error=True))
                self._stop(key)
            case _:
                detail = f"trainer of rank {rank} ended by {event.kind}: {event.detail or event.code}"
                if not world.stopping:
                    self._tell(m.Faulted(key=key, detail=detail))
                self._stop(key)
        if world.over and world.leaving_since is None:
            self._worlds.pop(key, None)

    def _check_left(self) -> None:
        """Tell the others that this node left, once its last snapshots are safe, or waiting does not help."""
        now = SYSTEM.monotonic()
        for key, world in list(self._worlds.items()):
            if world.leaving_since is None or not world.over:
                continue
            if world.last and not world.flushing:
                self._flush(world)
            patience = LAST_PATIENCE if world.last or self._departure.told else HELD_PATIENCE
            if world.left_safely() or now > self._departure.waits_until(world.leaving_since, patience):
                del self._worlds[key]
                self._tell(m.Left(key=key, step=world.step))

    def _flushed(self, slot: int, step: int) -> None:
        for world in self._worlds.values():
            if world.flushing and world.step == step:
                world.flushed.add(slot)

    def _saved(self, event: Written) -> None:
        self._flushed(event.slot, event.saved.step)
        self._figures.wrote(event.saved.step)
        self._last_saved[event.slot] = event.saved
        if len(self._last_saved) == len(self._slots) and len(set(self._last_saved.values())) == 1:
            self._tell(m.Saved(saved=event.saved))

    def _committed(self, step: int, error: str | None) -> None:
        if error is None:
            self._figures.committed(step, SYSTEM.monotonic())
            self._journal.emit("checkpoint.committed", step=step)
        else:
            self._figures.failed(step, error)
            self._journal.emit("checkpoint.failed", step=step, error=error)

    # What the membership says.

    def _hear_peer(self, event: m.PeerHeard | m.PeerRefused) -> None:
        # At the job's end everybody goes, and nobody is lost.
        if isinstance(event, m.PeerRefused) and not self._finished:
            self._journal.emit("peer.lost", peer=event.id.partition("@")[0], evidence=event.evidence)
        if self._member is not None:
            self._member.tell(event)

    def _etcd_heard(self, there: bool) -> None:
        for slot in self._slots:
            slot.set_etcd_away(not there)


def _words(event: w.TrainerExited, node: str, rank: int) -> str:
    if event.fault is None:
        return f"rank {rank} on {node}: {event.detail or event.kind}"
    return f"rank {rank} on {node}: {event.fault.kind}: {event.fault.message}\n\n{event.fault.traceback[-8000:]}"


def guarded(work: Callable[[], None]) -> int:
    """Run a keeper's work and return its exit code; an error goes to torchrun's error file and to stderr."""
    from elastic3d.worker.failure import record

    try:
        work()
    except Elastic3dError as error:
        record(error)
        return error.exit_code
    return 0

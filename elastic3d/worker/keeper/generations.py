"""The trainers of a node by generation: forked beside those that run, started, asked to leave, stopped.

The membership decides what ought to run, and is sent what became of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from elastic3d.clock import SYSTEM, Clock
from elastic3d.coverage import AuditCoverage
from elastic3d.health.hearing import Compared, Finding
from elastic3d.membership import events as m
from elastic3d.membership import topology
from elastic3d.port import Audited, AuditReport, Go, NearMemory, StepRecord
from elastic3d.rendezvous.settings import Settings
from elastic3d.snapshots.interval import at_risk
from elastic3d.trust.credentials import Credentials
from elastic3d.values import DeviceFacts, Generation, Node, ProvenChain
from elastic3d.worker.journal import Journal
from elastic3d.worker.keeper.silence import Silence
from elastic3d.worker.keeper.slow_nodes import SlowNodes
from elastic3d.worker.keeper.standing import Standing
from elastic3d.worker.keeper.trainer_group import TrainerGroup, assignment
from elastic3d.worker.options import RunOptions
from elastic3d.worker.processes import events as w
from elastic3d.worker.processes.failure import words
from elastic3d.worker.processes.slot import SlotPort
from elastic3d.worker.pulse import Figures
from elastic3d.worker.safety import SafeStep

UNREACHABLE = 60.0
"""Seconds for which a node that took no snapshots is not tried again while there is another."""

LATE = 10.0
"""Seconds after which a member that the running generation has not taken in counts as a spare: most newcomers are let
in sooner, and who leaves is gone."""

HELD_WITHIN = 60.0
"""Seconds in which a buddy has to take a snapshot while the safe step is too old; doubled after each failure."""

HOUR = 3600.0
"""Seconds within which a second accident of a node's devices or memory has it set aside."""

ENDING = (Audited.LYING, Audited.ALTERED, Audited.SPLIT, Audited.MISCALCULATED, Audited.SPIKED)
"""What ends a generation where something is done about it."""

LINE = 300
"""Characters of a collective's error about a lost peer that are passed on to the other nodes."""

TrainerEvent = w.Started | w.TrainerReady | w.Restored | w.StepFinished | w.AuditHeard | w.TrainerExited


class Generations:
    """Trainer groups by their generation's key. running: the generation that was started last; None for a spare.

    finished: `main` has returned, and its last state is in the store if there is one (`Ending`).

    buddy: where snapshots are copied to; own_buddy: where they go while no node is about to leave. raised: the script's
    last error here, with its traceback. credentials: what this node's processes show to other nodes, once it has
    joined. tell: takes the events for the membership.
    """

    def __init__(
        self,
        settings: Settings,
        options: RunOptions,
        slots: Sequence[SlotPort],
        tell: Callable[[m.Event], None],
        *,
        journal: Journal,
        figures: Figures,
        clock: Clock = SYSTEM,
    ) -> None:
        self._settings, self._options, self._slots, self._tell = settings, options, slots, tell
        self._journal, self._figures, self._clock = journal, figures, clock
        self.worlds: dict[str, TrainerGroup] = {}
        self.running: Generation | None = None
        self._slipped_at: float | None = None
        # When an audit last found that a slot's device erred once.
        self._erred_at: dict[int, float] = {}
        self.buddy: Node | None = None
        self.own_buddy: Node | None = None
        self.finished = False
        self.raised = ""
        self.credentials: Credentials | None = None
        self.device: DeviceFacts | None = None
        self.proven: ProvenChain | None = None
        self._out_of_reach: dict[str, float] = {}
        # The members, as far as this node leads and hears of them, and since when in the running generation.
        self._members: dict[str, tuple[Node, float]] = {}
        self._safe_step: SafeStep | None = None
        self._every = self._first_interval()
        self._stale_told: float | None = None
        self._held_at: dict[int, float] = {}
        self._know_nothing()
        self._standing = Standing()
        self._patience = HELD_WITHIN
        self.silence = Silence(self._slots, tell, emit=journal.emit, clock=clock)
        self._slow_nodes = SlowNodes(options.health, emit=journal.emit, tell=tell, figures=figures)

    def show(self, credentials: Credentials) -> None:
        """Have the slots and future trainers show these credentials, and accept those of the same run."""
        self.credentials = credentials
        for slot in self._slots:
            slot.set_credentials(credentials)

    def sealed(self, generation: Generation, me: Node) -> None:
        """Accept replicas of a generation's snapshots only from the nodes that hold those ranks by its record."""
        if generation.first_rank(me.name, me.incarnation) is None:
            self._stand_by()
        ranks = tuple(node.id for node in generation.node_of_rank)
        for slot in self._slots:
            slot.sealed(generation.number, ranks)

    def prepare(self, generation: Generation, me: Node) -> None:
        """Fork the trainers of a generation; they build everything and wait."""
        first = generation.first_rank(me.name, me.incarnation)
        assert first is not None
        trainers, now = {}, self._clock.monotonic()
        for slot in self._slots:
            rank, erred_at = first + slot.index, self._erred_at.get(slot.index)
            trainer_assignment = assignment(
                self._settings,
                self._options,
                slot=slot.index,
                rank=rank,
                generation=generation,
                credentials=self.credentials,
                device=self.device,
                proven=self.proven,
                newcomer=self._standing.newcomer(generation.number),
                accident=now - erred_at if erred_at is not None else None,
            )
            trainers[slot.index] = slot.prepare(trainer_assignment)
        self.worlds[generation.key] = TrainerGroup(generation=generation, first_rank=first, trainers=trainers)

    def _stand_by(self) -> None:
        """Take note that others make steps: nothing that was said of this node's is said any more."""
        self.running = None
        self._know_nothing()
        self._fresh()
        self._figures.training("")
        self._figures.slow({})
        self._figures.begin()

    def _know_nothing(self) -> None:
        """Forget which step the newest generation began with here, and what raised before."""
        # -1 before the first one, None until it has its state.
        self._began_at: int | None = -1
        # The step after which the user's code raised, -1 for none, and what, since a generation last had its state.
        self._failed_after, self._failure = -1, ""

    def go(self, generation: Generation, me: Node) -> bool:
        """Let the prepared trainers of a generation restore and train; return False if one has ended meanwhile.

        That has been told already: another generation follows.
        """
        world = self.worlds.get(generation.key)
        if world is None:
            return False
        self._standing.began(generation.number)
        servers = tuple(
            f"{node.address}:{place.tile_port}"
            for node in (*generation.nodes, *generation.spares)
            for place in node.slots
        )
        self.running, self.finished = generation, False
        self.sealed(generation, me)
        self._safe_step = None
        self._every = self._first_interval()
        self._figures.begin()
        self._fresh()
        for slot in self._slots:
            slot.set_generation(generation.number)
        # All that may be spares are in its record: a member that is not has just come, or is about to leave.
        now = self._clock.monotonic()
        self._members = {id: (node, now) for id, (node, _) in self._members.items()}
        self.own_buddy = self._buddy_of(me)
        self.keep_with(self.own_buddy)
        self._note_failure(generation)
        go = Go(
            servers=servers,
            near=tuple(NearMemory(server=f"{me.address}:{s.tile_port}", lender=s.lender) for s in self._slots),
            reached=generation.reached,
            distrusted=generation.distrusted,
            rollbacks=generation.rollbacks,
            failed_after=self._failed_after,
            failure=self._failure,
        )
        self.silence.begin(generation.key, me.incarnation, world.trainers)
        self._slow_nodes.begin(generation, first=world.first_rank == 0)
        for slot in self._slots:
            slot.go(world.trainers[slot.index], go)
        return True

    def _note_failure(self, generation: Generation) -> None:
        """Note whether the generation is formed because code raised after a step, by whose state it would be skipped.

        One that has not had its state yet has made no step: whatever ended it, the same holds for the next one.
        """
        if self._began_at is not None:
            failed = generation.cause.of_script and 0 < generation.tried_at != self._began_at
            self._failed_after = generation.tried_at if failed else -1
            self._failure = generation.detail if failed else ""
        self._began_at = None

    def keep_with(self, buddy: Node | None) -> None:
        """Have the snapshots copied to `buddy` from now on, including those that only another node has."""
        self.buddy = buddy
        self._held_at = dict.fromkeys(range(len(self._slots)), self._clock.monotonic())
        for world in self.worlds.values():
            world.held.clear()
        for slot in self._slots:
            slot.set_buddy(self._address_of(buddy, slot.index) if buddy is not None else None)

    def _buddy_of(self, me: Node) -> Node | None:
        """Return the node that is to hold this node's snapshots: one that has been in reach lately.

        A node that trains alone has them copied to a spare, which would take its place. None where this node is alone,
        or no spare is in reach. If all nodes that train are out of reach and there is a store, the snapshots stay at
        home alone for a while, since otherwise none would be safe and no checkpoint could be made of them; without a
        store, what the buddy still has is worth more.
        """
        assert self.running is not None
        now, nodes = self._clock.monotonic(), self._holders(self.running, me)
        self._out_of_reach = {id: at for id, at in self._out_of_reach.items() if now - at < UNREACHABLE}
        able = [node for node in nodes if node.id == me.id or node.id not in self._out_of_reach]
        if len(able) == 1 and len(self.running.nodes) > 1 and self._options.store is None:
            able = [me, *sorted((n for n in nodes if n.id != me.id), key=lambda n: self._out_of_reach[n.id])[:1]]
        at = next(i for i, node in enumerate(able) if node.id == me.id)
        buddy = able[topology.buddies(able)[at]]
        return buddy if buddy.id != me.id else None

    def _holders(self, running: Generation, me: Node) -> tuple[Node, ...]:
        """Return the nodes among which copies of snapshots are spread, this one included.

        A spare may have come since the generation was sealed.
        """
        if len(running.nodes) > 1:
            return running.nodes
        now, sealed = self._clock.monotonic(), {node.id for node in (*running.nodes, *running.spares)}
        late = (node for node, at in self._members.values() if node.id not in sealed and now - at >= LATE)
        return (*running.nodes, *(one for one in (*running.spares, *late) if len(one.slots) == len(me.slots)))

    def members(self, nodes: Iterable[Node]) -> None:
        """Take note of all members that there are."""
        now = self._clock.monotonic()
        self._members = {node.id: (node, self._members.get(node.id, (node, now))[1]) for node in nodes}

    def joined(self, node: Node) -> None:
        """Take note of a member, which may be known."""
        self._members[node.id] = node, self._members.get(node.id, (node, self._clock.monotonic()))[1]

    def gone(self, id: str) -> None:
        """Take note that a member is gone."""
        self._members.pop(id, None)

    def unreachable(self, event: w.BuddyUnreachable, me: Node) -> None:
        """Have the snapshots copied to another node if it is the present buddy that does not take them.

        While this node is in no generation, as one that was cut off and joins again, nobody else is there to take them.
        """
        if (
            self.running is not None
            and self.buddy is not None
            and event.address == self._address_of(self.buddy, event.slot)
        ):
            self._choose(me, f"{event.address} took no snapshot for {event.seconds:.1f} s: {event.error}")

    def _choose(self, me: Node, why: str) -> None:
        former = self.buddy
        if former is not None:
            self._out_of_reach[former.id] = self._clock.monotonic()
        buddy = self._buddy_of(me)
        if buddy != former:
            names = [node.name if node is not None else None for node in (buddy, former)]
            self._journal.emit("buddy.changed", buddy=names[0], former=names[1], detail=why)
            self.own_buddy = buddy
            self.keep_with(buddy)

    def _address_of(self, buddy: Node, slot: int) -> str:
        return f"{buddy.address}:{buddy.slots[slot].tile_port}"

    def look_after_snapshots(self, me: Node) -> None:
        """Report a safe step that is too old, and act if this node is the cause. Called after each step."""
        now = self._clock.monotonic()
        if self.running is None or self._safe_step is None or len(self._holders(self.running, me)) < 2:
            return
        if self.buddy is None and not self._out_of_reach_lately(now):
            self._choose(me, "other nodes are tried again" if self._out_of_reach else "a spare has come")
        stale = self._safe_step.stale(now)
        if stale is None:
            if self._stale_told is not None:
                self._journal.emit("snapshot.fresh", **self._safe_step.newest())
            self._fresh()
            return
        self._figures.stale(str(stale))
        world = self.worlds.get(self.running.key)
        held = world.held if world is not None else {}
        # If the safe step is the newest that this node holds, the others are waiting for this node.
        slots = [slot.index for slot in self._slots if held.get(slot.index, -1) <= stale.safe_step]
        first = world is not None and world.first_rank == 0
        if self._stale_told is None and (slots or first):
            self._journal.emit("snapshot.stale", step=stale.step, safe_step=stale.safe_step, age=stale.age, slots=slots)
        self._stale_told = now
        if self.buddy is not None and any(now - self._held_at[slot] > self._patience for slot in slots):
            # Large snapshots take long to send: with the same time limit on each try, none would ever arrive.
            self._patience *= 2
            self._choose(me, str(stale))

    def _out_of_reach_lately(self, now: float) -> bool:
        return any(now - at < UNREACHABLE for at in self._out_of_reach.values())

    def _fresh(self) -> None:
        self._stale_told = None
        self._figures.stale("")

    def trainers(self, key: str) -> list[tuple[SlotPort, int]]:
        """Return the living trainers of a generation, with their slots."""
        world = self.worlds.get(key)
        if world is None:
            return []
        return [(self._slots[i], trainer) for i, trainer in world.trainers.items() if i not in world.ended]

    def pids(self) -> dict[int, int]:
        """Return the pids of the living trainers of the running generation by their slot, as far as they began."""
        world = self.worlds.get(self.running.key) if self.running is not None else None
        # Asked on other threads, too, while pids are added.
        return {} if world is None else {slot: pid for slot, pid in dict(world.pids).items() if slot not in world.ended}

    def stop(self, key: str) -> None:
        """Kill the trainers of a generation; the end of one whose `main` has returned is no longer waited for."""
        world = self.worlds.get(key)
        if world is not None and world.returned_at is not None:
            del self.worlds[key]
        elif world is not None:
            world.stopping = True
            for slot, trainer in self.trainers(key):
                slot.stop(trainer)

    def forget(self) -> None:
        """Kill all trainers and begin anew under another incarnation; what the slots hold in memory stays."""
        for slot in self._slots:
            slot.stop_all()
        self.worlds.clear()
        self._members.clear()
        self.finished = False
        self._stand_by()
        self.silence.over()

    def find(self, slot: int, trainer: int) -> tuple[str, TrainerGroup] | None:
        """Return the group of a slot's trainer, with its generation's key."""
        return next(((k, v) for k, v in self.worlds.items() if v.trainers.get(slot) == trainer), None)

    def held(self, event: w.SnapshotHeld) -> None:
        """Take note of a snapshot that is held at home and at the buddy."""
        self._journal.emit(
            "snapshot.held", step=event.step, sent=event.sent, slot=event.slot, generation=event.generation
        )
        if event.buddy != (self._address_of(self.buddy, event.slot) if self.buddy is not None else None):
            return  # a former buddy's: the present one may not have it yet
        self._held_at[event.slot], self._patience = self._clock.monotonic(), HELD_WITHIN
        for world in self.worlds.values():
            if world.generation.number == event.generation:
                world.held[event.slot] = max(event.step, world.held.get(event.slot, -1))

    def heard(self, event: TrainerEvent) -> None:
        """Take note of what a trainer did."""
        keyed_world = self.find(event.slot, event.trainer)
        if keyed_world is None:
            return
        key, world = keyed_world
        rank = world.first_rank + event.slot
        match event:
            case w.Started():
                world.pids[event.slot] = event.pid
            case w.TrainerReady():
                world.prepared.add(event.slot)
                if len(world.prepared) == len(self._slots):
                    self._tell(m.TrainersPrepared(key=key))
                return
            case w.StepFinished() if event.slot == 0:
                record = event.record
                self._standing.stepped(record)
                now = self._clock.monotonic()
                self._figures.stepped(record, now)
                if self._safe_step is not None:
                    self._safe_step.stepped(record.step, record.safe_step, now, every=record.snapshot_every)
                if world.first_rank == 0:
                    self._tell_interval(record)
                # Without snapshots nothing is ever held: every step counts then, since starting again would lose them
                # all.
                kept = self._options.snapshot_every != 0 or self._options.store is not None
                safe = record.safe_step if kept else record.step
                self._tell(m.StepReported(step=record.step, etcd_away=record.etcd_away_everywhere, safe=safe))
                self._slow_nodes.stepped(record)
            case w.Restored() if event.slot == 0:
                self._figures.audits(event.state.audits)
                self._began_at = event.state.step
                now = self._clock.monotonic()
                self._safe_step = SafeStep(
                    every=self._every,
                    start=event.state.step,
                    now=now,
                    most_seconds=self._options.stale_after,
                    most_snapshots=self._options.stale_snapshots,
                )
            case w.AuditHeard() if rank in event.report.ranks and _is_accident(event.report):
                self._erred_at[event.slot] = self._clock.monotonic()
            case w.AuditHeard() if event.report.kind is Audited.EXAMINED:
                self._standing.examined(world.generation.number)
            case w.AuditHeard() if event.report.kind is Audited.UNCHECKED:
                self._figures.unchecked(event.report.where, event.report.detail)
            case w.AuditHeard() if event.report.kind in ENDING and event.report.acted:
                world.convicted = event.report
            case w.AuditHeard() if event.report.coverage is not None:
                self._figures.audits(event.report.coverage)
            case w.AuditHeard() if _ends_audits(event.report):
                self._figures.audits(AuditCoverage(off=event.report.detail))
            case w.TrainerExited():
                self._exited(event, key, world, rank)
            case _:
                pass
        self._journal.trainer(event, world.generation.number, rank)

    def _slipped(self) -> bool:
        """Note an accident of a device of this node, or of its memory; return whether it is the second in an hour.

        One node alone is never set aside for that: nobody is there to go on without it.
        """
        now, before = self._clock.monotonic(), self._slipped_at
        self._slipped_at = now
        others = self.running is not None and len(self.running.nodes) > 1
        return others and before is not None and now - before < HOUR

    def _first_interval(self) -> int:
        every = self._options.snapshot_every
        return 1 if every is None else every

    def _tell_interval(self, record: StepRecord) -> None:
        """Say that snapshots are taken more or less often from now on, and what the death of a node may cost then."""
        former, self._every = self._every, record.snapshot_every
        if former != self._every:
            self._journal.emit(
                "snapshot.interval",
                step=record.step,
                every=self._every,
                former=former,
                costliest=record.snapshot_rank,
                at_risk=at_risk(self._every),
            )

    def _exited(self, event: w.TrainerExited, key: str, world: TrainerGroup, rank: int) -> None:
        world.ended[event.slot] = event.step
        self.silence.ended(event.slot, event.trainer)
        world.failed |= event.kind not in (w.ExitKind.DONE, w.ExitKind.LEFT)
        match event.kind:
            case w.ExitKind.DONE:
                world.unsaved = max(world.unsaved, event.unsaved)
                if world.over and not world.failed:
                    world.returned_at = self._clock.monotonic()
            case w.ExitKind.LEFT:
                world.leaving_since = self._clock.monotonic()
            case w.ExitKind.STOPPED if world.convicted is None:
                pass
            case w.ExitKind.PEER_LOST:
                exception = event.exception
                said = exception.message.strip().partition("\n")[0][:LINE] if exception is not None else event.detail
                self._tell(m.TrainerLostPeer(key=key, detail=f"rank {rank}: {said}" if said else ""))
                self.stop(key)
            case w.ExitKind.CONVICTED | w.ExitKind.STOPPED:
                # What was heard counts, too, if a death had them stopped before they could end by it.
                self._convicted(key, world)
                self.stop(key)
            case w.ExitKind.ERROR | w.ExitKind.OUT_OF_MEMORY:
                said = self.raised = words(event, self._settings.node, rank)
                exception = event.exception
                final = exception is not None and exception.final
                short = event.kind is w.ExitKind.OUT_OF_MEMORY
                about: dict[str, Any] = {
                    "traceback": exception.traceback if exception is not None else None,
                    "final": final,
                    "generation": world.generation.number,
                    "rank": rank,
                }
                if short:
                    self._journal.emit("memory.exhausted", error=said.partition("\n\n")[0], **about)
                else:
                    self._journal.emit("script.raised", error=said.partition("\n")[0], **about)
                self._tell(
                    m.TrainerFailed(
                        key=key, detail=said, error=True, final=final, out_of_memory=short, short=event.short
                    )
                )
                self.stop(key)
            case _:
                detail = f"trainer of rank {rank} ended by {event.kind}: {event.detail or event.code}"
                if not world.stopping:
                    self._tell(m.TrainerFailed(key=key, detail=detail))
                self.stop(key)
        if world.over and world.leaving_since is None and world.returned_at is None:
            self.worlds.pop(key, None)

    def _convicted(self, key: str, world: TrainerGroup) -> None:
        """Say once, of all slots, what ended a generation's trainers."""
        report = world.convicted
        assert report is not None
        if world.said:
            return
        world.said = True
        lying = report.kind is Audited.LYING
        detail = report.detail
        if lying:
            detail = f"rank {', '.join(map(str, report.ranks))} computes wrongly: {report.detail}"
        ours = range(world.first_rank, world.first_rank + len(self._slots))
        if any(culprit in ours for culprit in report.ranks):
            again = self._slipped()
            detail += "; so did something on this node within the last hour" if again and not lying else ""
            own = world.generation.node_of_rank[world.first_rank]
            accused = {own.id: own.place} if lying or again else {}
            self._tell(m.TrainerFailed(key=key, detail=detail, clean=report.clean, accused=accused))
            return
        culprits = [world.generation.node_of_rank[culprit] for culprit in report.ranks] if lying else []
        accused = {node.id: node.place for node in culprits}
        self._tell(
            m.TrainerLostPeer(key=key, detail=detail, clean=report.clean, rollback=report.rollback, accused=accused)
        )


def _ends_audits(report: AuditReport) -> bool:
    return report.kind is not Audited.MISCALCULATED and report.finding == Finding.NONDETERMINISTIC


def _is_accident(report: AuditReport) -> bool:
    """Return whether it names the ranks whose devices erred once; of what differs on its way, both ends are named."""
    computed = report.compared in (Compared.PASSES, Compared.SUM)
    return report.kind is Audited.FAILED and report.finding == Finding.TRANSIENT and computed

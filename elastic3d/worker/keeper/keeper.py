"""The first keeper of a node: it speaks for the node, and starts and stops the trainers of its slots.

Everything that happens arrives in one queue and is handled on the main thread: events of the slots, actions of the
membership, signals. The membership decides what ought to run; `Generations` starts and stops it, `Checkpoints` writes
its state to the store, `LeaveRequest` has the node leave in order.
"""

from __future__ import annotations

import queue
import secrets
import signal
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from checkpointing import Store
from checkpointing.stores.retrying import Trouble
from elastic3d import environment, notices, threads
from elastic3d.clock import SYSTEM
from elastic3d.errors import JobEnded
from elastic3d.etcd import EtcdClient
from elastic3d.etcd_refs import EtcdRegister
from elastic3d.health import deadlines, stuck
from elastic3d.health.evidence import EvidenceWriter
from elastic3d.health.memory import MemoryLadder
from elastic3d.health.options import Exhaustion, Watching, shared
from elastic3d.log import Level
from elastic3d.membership import actions as acts
from elastic3d.membership import events as m
from elastic3d.membership.driver.links import Links
from elastic3d.membership.driver.member import Member
from elastic3d.membership.policy import Policy
from elastic3d.membership.records import MemberRecord, Notice, Pulse, ReasonToGoBack
from elastic3d.membership.stalls import Judge, Stall, Verdict
from elastic3d.metrics.memory import resident
from elastic3d.planner import Plan, plan, plan_below
from elastic3d.planner.operations import operations
from elastic3d.planner.traffic import gradient_traffic
from elastic3d.rendezvous.connect import connect, encryption
from elastic3d.rendezvous.settings import Settings
from elastic3d.shortfall import MemoryBound
from elastic3d.storage import open_checked
from elastic3d.trust.agreement import SecretNews, What
from elastic3d.trust.credentials import Credentials
from elastic3d.trust.secret import obtain
from elastic3d.values import Generation, Layout, ModelProfile, Node
from elastic3d.values import Slot as Place
from elastic3d.worker.checkpoints.node_checkpoints import Checkpoints
from elastic3d.worker.checkpoints.uploader import TilesUploaded, WriteFailed
from elastic3d.worker.journal import Journal
from elastic3d.worker.keeper.admit import admit
from elastic3d.worker.keeper.curves import Curves
from elastic3d.worker.keeper.departure import LeaveRequest
from elastic3d.worker.keeper.ending import Ending
from elastic3d.worker.keeper.generations import Generations
from elastic3d.worker.keeper.goodput import LiveGoodput
from elastic3d.worker.keeper.injected import InjectedFaults, NodeProcesses
from elastic3d.worker.keeper.meeting import Meeting
from elastic3d.worker.keeper.node_metrics import LiveNode, own_row
from elastic3d.worker.keeper.observers import observers_of
from elastic3d.worker.keeper.progress import ProgressReporter
from elastic3d.worker.keeper.step_waits import WaitsReporter
from elastic3d.worker.keeper.trainer_group import assignment
from elastic3d.worker.keeper.warming import Inbox, Measured, Signalled, measure, planned_with, wait_at_gate
from elastic3d.worker.options import RunOptions
from elastic3d.worker.processes import events as w
from elastic3d.worker.processes.failure import ended
from elastic3d.worker.processes.slot import SlotPort
from elastic3d.worker.pulse import Figures

LOOKS = 1.0
"""Seconds after which the keeper checks on its trainers even if nothing has happened."""


@dataclass(frozen=True, slots=True)
class EtcdHeard:
    """etcd has stopped answering, or answers again."""

    there: bool


@dataclass(frozen=True, slots=True)
class Proposed:
    """The next membership, None while there is none."""

    generation: Generation | None


@dataclass(frozen=True, slots=True)
class SealedMembership:
    """The running membership, as its record has it."""

    generation: Generation


class Keeper:
    """One node's membership and its slots.

    slots: in local order, all putting their events into `inbox`. evidence: where the first one's is written.
    """

    def __init__(
        self,
        settings: Settings,
        options: RunOptions,
        slots: Sequence[SlotPort],
        inbox: Inbox,
        evidence: EvidenceWriter,
    ) -> None:
        self._settings, self._options, self._slots, self._inbox = settings, options, list(slots), inbox
        self._evidence = evidence
        self._costs = options.costs
        self._goodput = LiveGoodput(
            settings.node, lambda detail: self._journal.emit("goodput.restarted", detail=detail)
        )
        self._observers = observers_of(settings, options)
        self._journal = Journal(
            options.events,
            settings.run_id,
            settings.node,
            limit=options.events_limit,
            observe=self._observe,
        )
        self._journal.emit("node.started")
        threads.report_to(self._journal.thread_failed)
        self._figures = Figures(deadlines.figures(options.health))
        self._generations = Generations(
            settings, options, self._slots, self._tell, journal=self._journal, figures=self._figures
        )
        self._progress = ProgressReporter(self._journal.emit, self._figures)
        self._waits = WaitsReporter(self._journal.emit, self._goodput.waited)
        self._curves = Curves(options.trackers, run_id=settings.run_id, emit=self._journal.emit)
        self._member: Member | None = None
        self._checkpoints: Checkpoints | None = None
        self._client: EtcdClient | None = None
        self._exit: acts.Exit | None = None

    def run(self) -> None:
        """Take part until the job or this node's part in it is over; errors say why it failed."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, _frame: self._inbox.put(Signalled(number)))
        if self._observers is None:
            self._open_store()
            return
        try:
            self._observers.begin(self._live(), self._journal.emit)
            self._open_store()
        finally:
            self._observers.close()

    def _observe(self, event: str, fields: Mapping[str, Any]) -> None:
        """Count what the journal writes. Runs on any thread."""
        self._goodput.observe(event, fields)
        if self._observers is not None:
            self._observers.observe(event, fields)

    def _live(self) -> LiveNode:
        return LiveNode(
            pulse=lambda: self._pulse() if self._member is not None else None,
            processes=self._processes,
            awaited=lambda: self._progress.awaited,
            answers=lambda: self._client.session.answers if self._client is not None else None,
            goodput=self._goodput.seconds,
        )

    def _open_store(self) -> None:
        at = self._options.store
        register = None
        if at is not None and at.register:
            register = EtcdRegister(connect(self._settings), self._settings.prefix, at.url)
        try:
            self._warm_up(*(open_checked(at, register, self._waiting) if at is not None else (None, 0)))
        finally:
            if register is not None:
                register.close()

    def _waiting(self, trouble: Trouble) -> None:
        """Report that the store is waited for. Runs on the thread that waits."""
        self._journal.emit("store.waiting", error=trouble.error, tries=trouble.tries, seconds=trouble.seconds)

    def _warm_up(self, store: Store | None, floor: int) -> None:
        places = len(self._slots) if self._settings.admission else 0
        measuring = assignment(self._settings, self._options, slot=0, places=places)
        measured = measure(self._slots[0], measuring, self._inbox)
        self._profile = profile = measured.profile
        self._generations.device, self._generations.proven = measured.device, measured.proven
        self._costs = planned_with(self._options.costs, measured.device, profile)
        counted = operations(profile, measured.device, len(self._slots))
        self._journal.emit(
            "model.measured",
            parameters=profile.parameters,
            sample_flops=counted.sample,
            peak_flops=counted.peak,
            detail=counted.why or None,
        )
        # A model that no number of nodes could train is refused before the job waits for more of them.
        self._plan(min(self._settings.policy.maximum, profile.blocks * profile.leaves), profile)
        if not wait_at_gate(self._settings.gate, self._inbox):
            return
        if self._settings.admission:
            admit(self._settings, self._options, profile, measured.checks, self._journal)
        self._take_part(measured, store, floor)

    def _plan(
        self,
        nodes: int,
        profile: ModelProfile,
        present: Layout | None = None,
        speeds: Sequence[float] = (),
        bound: MemoryBound | None = None,
        counts: Collection[int] | None = None,
    ) -> Plan:
        given = (nodes, len(self._slots), profile, self._options.layout or Layout())
        if bound is None:
            return plan(*given, previous=present, costs=self._costs, speeds=speeds, counts=counts)
        return plan_below(bound, *given, previous=present, costs=self._costs, speeds=speeds, counts=counts)

    # Taking part.

    def _take_part(self, measured: Measured, store: Store | None, floor: int) -> None:
        client = connect(self._settings)
        secret = obtain(client, self._settings.root)
        links = Links(
            self._settings.address,
            lambda event: self._hear_peer(event),
            secret=secret,
            encryption=encryption(self._settings),
            refused=lambda refusal: self._inbox.put(w.ConnectionRefused(slot=0, refusal=refusal)),
        )
        self._meeting = meeting = Meeting(self._settings.address)
        node = Node(
            name=self._settings.node,
            incarnation=secrets.token_hex(6),
            address=self._settings.address,
            slots=tuple(Place(tile_port=slot.tile_port) for slot in self._slots),
            heartbeat_port=links.port,
            store_port=meeting.port,
            labels=self._settings.labels,
            home=self._settings.home,
        )
        policy = self._settings.policy
        record = MemberRecord(
            node=node,
            profile=replace(measured.profile, health=shared(self._options.health)),
            device=measured.device,
            floor=floor,
            minimum=policy.minimum,
            maximum=policy.maximum,
            encrypted=bool(self._settings.cert),
            chaos=self._settings.chaos,
        )
        if store is not None:
            self._checkpoints = Checkpoints(
                store,
                self._options.saving,
                self._slots,
                self._inbox.put,
                journal=self._journal,
                figures=self._figures,
                settled=lambda saved, error: self._tell(m.Settled(saved=saved, error=error)),
                audits=self._options.health is not None and self._options.health.audit > 0,
            )
        self._ending = Ending(self._generations, self._checkpoints, self._tell)
        self._leaving = LeaveRequest(
            self._generations,
            self._checkpoints,
            self._tell,
            journal=self._journal,
            drain=self._settings.drain,
        )
        self._faults = InjectedFaults(
            client,
            allowed=self._settings.chaos,
            slots=len(self._slots),
            journal=self._journal,
            processes=self._processes,
        )
        self._client, self._links = client, links
        self._generations.show(
            Credentials(secret=secret, id=node.id, certificate=self._settings.cert, key=self._settings.key)
        )
        self._join(client, links, record)
        watcher = None
        try:
            watcher = notices.watch(self._settings.notices, self._inbox.put)
            while self._exit is None:
                self._handle(self._next())
                if self._exit is not None and self._exit.rejoin:
                    self._rejoin(client, links, record)
            if watcher is not None and not self._exit.failed:
                watcher.acknowledge()
        finally:
            self._curves.finish()
            if watcher is not None:
                watcher.close()
            for slot in self._slots:
                slot.stop_all()
            if self._checkpoints is not None:
                self._checkpoints.close_uploaders(self._close_patience())
            assert self._member is not None
            self._member.close()
            links.close()
            if self._checkpoints is not None:
                self._checkpoints.close_committer(self._close_patience())
            client.close()
            meeting.close()
            self._curves.wait()
        self._end()

    def _join(
        self,
        client: EtcdClient,
        links: Links,
        record: MemberRecord,
        *,
        again: bool = False,
        said: tuple[ReasonToGoBack, ...] = (),
    ) -> None:
        self._node = record.node
        assert self._generations.credentials is not None
        self._member = Member(
            client,
            self._settings.root,
            record,
            _balancing(self._settings.policy, self._options.health),
            lambda nodes, mine, present, speeds=(), bound=None, counts=None: self._plan(
                nodes, mine.profile or self._profile, present, speeds, bound, counts
            ),
            self._inbox.put,
            pulse=self._pulse,
            heard=lambda there: self._inbox.put(EtcdHeard(there)),
            noted=self._noted,
            secret=self._generations.credentials.secret,
            trusted=self._inbox.put,
            judge=_judge(self._options.health),
            ladder=_ladder(self._options.health),
            goodput=self._goodput,
            said=said,
        )
        if self._member.start(links, again=again, end_seen=self._settings.end_seen):
            self._journal.emit("member.joined", incarnation=record.node.incarnation)

    def _rejoin(self, client: EtcdClient, links: Links, record: MemberRecord) -> None:
        """Come back as a newcomer after this node was evicted; what the slots hold stays, and what it has to say."""
        assert self._exit is not None
        assert self._member is not None
        self._journal.emit("member.fenced", incarnation=self._node.incarnation, detail=self._exit.detail)
        self._curves.stop()
        self._goodput.resign()
        self._generations.forget()
        if self._checkpoints is not None:
            self._checkpoints.forget()
        self._leaving.proposed = self._exit = None
        self._member.close()
        node = replace(record.node, incarnation=secrets.token_hex(6))
        assert self._generations.credentials is not None
        self._generations.show(self._generations.credentials.of(node.id))
        self._join(client, links, replace(record, node=node), again=True, said=self._member.said)

    def _processes(self) -> NodeProcesses:
        """Return this node's processes, as far as faults may be ordered of them."""
        return NodeProcesses(
            agent=environment.AGENT_PROCESS.read(),
            keepers=tuple(slot.pid for slot in self._slots),
            trainers=self._generations.pids(),
        )

    def _pulse(self) -> Pulse:
        """Return how this node is. Runs on the member's writing thread."""
        running = self._generations.running
        state = "draining" if self._leaving.leaving else "active" if running is not None else "spare"
        pulse = self._figures.pulse(state, running.number if running is not None else 0, SYSTEM.monotonic())
        processes = self._processes()
        _, nbytes = resident((*processes.keepers, *processes.trainers.values()))
        return replace(pulse, memory=sum(nbytes.values()))

    def _close_patience(self) -> float:
        return 0.0 if self._exit is None or self._exit.failed else self._leaving.close_patience()

    def _end(self) -> None:
        assert self._exit is not None
        step, trouble = self._figures.behind()
        if trouble:
            self._journal.emit("checkpoint.behind", step=step, error=trouble)
        if self._observers is not None:
            self._observers.finish()
        kind, level = ("error", Level.ERROR) if self._exit.failed else ("done", Level.INFO)
        self._journal.emit_at(level, "job.ended", kind=kind, error=self._exit.detail or None)
        self._journal.close()
        if self._exit.failed:
            raise JobEnded(ended(self._exit.detail, self._generations.raised))

    # What happens.

    def _next(self) -> object:
        """Return the next event; None when none came in time while this node or its trainers leave."""
        try:
            parts = (self._leaving, self._ending, self._generations.silence)
            pauses = [part.pause for part in parts if part.pause is not None]
            return self._inbox.get(timeout=min([*pauses, LOOKS]))
        except queue.Empty:
            return None

    def _handle(self, event: object) -> None:
        match event:
            case acts.Prepare():
                self._generations.prepare(event.generation, self._node)
            case acts.StartTrainers():
                if self._checkpoints is not None:
                    self._checkpoints.begin()
                self._meeting.forget(before=event.generation.number)
                if self._generations.go(event.generation, self._node):
                    self._tell_traffic(event.generation)
                    self._progress.began(first=event.generation.nodes[0].id == self._node.id)
                    self._curves.began(event.generation, self._node)
            case acts.AskLeave():
                self._leaving.ask_leave(event.key)
            case acts.Stop():
                self._generations.stop(event.key)
            case acts.Fence():
                if self._checkpoints is not None:
                    self._checkpoints.fence(event.number, event.distrusted)
            case acts.Commit():
                if self._checkpoints is not None:
                    self._checkpoints.commit(event.saved, event.number)
            case acts.Exit():
                self._exit = self._leaving.ended(event)
            case acts.Unreachable():
                self._journal.unreachable(event.ids)
            case acts.Concluded():
                self._journal.concluded(event.verdict)
                if event.stalls:
                    self._evidence.conclude(event.verdict, event.stalls)
            case acts.Awaiting():
                self._progress.awaiting(event.nodes, event.why)
            case acts.Draining():
                self._leaving.drain(event.seconds, event.detail)
            case notices.CloudNotice():
                self._leaving.heed(Notice(kind=str(event.kind), seconds=event.seconds, detail=event.detail))
            case Signalled():
                self._leaving.signalled(0, event.number)
            case w.SlotSignalled():
                self._leaving.signalled(event.slot, event.number)
            case Proposed():
                self._leaving.proposed = event.generation
                self._leaving.take_refuge(self._node)
            case EtcdHeard():
                for slot in self._slots:
                    slot.set_etcd_away(not event.there)
                self._curves.etcd(there=event.there)
            case SealedMembership():
                self._generations.sealed(event.generation, self._node)
                self._curves.sealed(event.generation, self._node)
            case m.MemberPut():
                self._generations.joined(event.record.node)
            case m.MemberGone():
                self._generations.gone(event.id)
            case m.Listed():
                self._generations.members(item.record.node for item in event.items if isinstance(item, m.MemberPut))
            case m.FaultOrdered():
                self._faults.heard(event, self._node.id)
            case SecretNews():
                self._take_secret(event)
            case w.ConnectionRefused():
                refusal = event.refusal
                self._journal.emit(
                    "peer.refused",
                    port=refusal.port,
                    peer=refusal.peer,
                    reason=refusal.reason,
                    more=refusal.more or None,
                )
            case _:
                self._handle_slot(event)
        self._leaving.look()
        self._ending.look()
        self._generations.silence.look()
        running = self._generations.running
        if running is None or not self._generations.trainers(running.key):
            self._progress.over()
        self._progress.look()
        self._curves.look()
        if self._observers is not None:
            self._observers.look()

    def _tell_traffic(self, generation: Generation) -> None:
        """Write what the reduction of a generation sends, if this node has its rank 0."""
        if generation.layout is None or generation.nodes[0].id != self._node.id:
            return
        traffic = gradient_traffic(generation.layout, self._profile, len(self._slots))
        self._journal.emit(
            "reduction.planned",
            turn_bytes=traffic.turn,
            turn_samples=traffic.turn_samples,
            step_bytes=traffic.step,
            detail=traffic.why or None,
            generation=generation.number,
        )

    def _handle_slot(self, event: object) -> None:
        match event:
            case w.SlotLost():
                self._exit = acts.Exit(failed=True, detail=f"slot {event.slot} is lost: {event.detail}")
            case TilesUploaded() | WriteFailed():
                assert self._checkpoints is not None
                self._leaving.heard(event)
                self._ending.heard(event)
                saved = self._checkpoints.heard(event)
                if saved is not None:
                    self._tell(m.Saved(saved=saved))
            case w.SnapshotTaken(checkpoint=True):
                keyed_world = self._generations.find(event.slot, event.trainer)
                if keyed_world is not None and self._checkpoints is not None:
                    self._checkpoints.offer(event.slot, event.step, keyed_world[1].generation)
                else:
                    self._slots[event.slot].unpin(event.step)
            case w.EventSaid():
                self._journal.said(event)
            case w.SnapshotHeld():
                self._generations.held(event)
            case w.RankSilent() | w.RankMoving():
                self._generations.silence.heard(event)
            case w.BuddyUnreachable():
                self._generations.unreachable(event, self._node)
            case w.Started() | w.TrainerReady() | w.Restored() | w.StepFinished() | w.AuditHeard() | w.TrainerExited():
                if isinstance(event, w.Restored) and event.state.damaged and self._checkpoints is not None:
                    self._checkpoints.distrust(event.state.damaged)
                if isinstance(event, w.Restored) and event.slot == 0:
                    self._curves.restored(event.state)
                self._generations.heard(event)
                if isinstance(event, w.StepFinished):
                    self._generations.look_after_snapshots(self._node)
                    if self._checkpoints is not None and self._generations.running is not None:
                        self._checkpoints.audited(event.record, self._generations.running)
                    keyed_world = self._generations.find(event.slot, event.trainer)
                    if keyed_world is not None and event.slot == 0:
                        self._curves.stepped(event.record, keyed_world[1].generation)
                        self._goodput.stepped(event.record)
                        self._waits.stepped(event.record, keyed_world[1])
                        self._figures.sheet(own_row(event.record, keyed_world[1]))
                        if keyed_world[1].first_rank == 0:
                            self._progress.stepped(event.record)
                        if self._observers is not None:
                            self._observers.stepped(event.record, keyed_world[1])
            case _:
                pass

    def _take_secret(self, news: SecretNews) -> None:
        if news.what is What.RESTORED:
            self._journal.emit("secret.restored", was=news.was)
            return
        self._journal.emit("secret.adopted")
        assert self._generations.credentials is not None
        self._generations.show(replace(self._generations.credentials, secret=news.secret))
        self._links.set_secret(news.secret)

    def _tell(self, event: m.Event) -> None:
        assert self._member is not None
        self._member.tell(event)

    def _noted(self, event: m.Event) -> None:
        """Take what the watch reports. Runs on the member's thread."""
        self._journal.noted(event)
        self._goodput.noted(event)
        match event:
            case m.ProposalPut():
                self._inbox.put(Proposed(event.proposal.generation))
            case m.ProposalGone():
                self._inbox.put(Proposed(None))
            case m.GenerationPut():
                self._inbox.put(SealedMembership(event.generation))
            case m.FaultOrdered() | m.MemberPut() | m.MemberGone() | m.Listed(tier=m.Tier.ROSTER):
                self._inbox.put(event)
            case m.Listed(tier=m.Tier.BOARD):
                for item in event.items:
                    if isinstance(item, m.GenerationPut):
                        self._inbox.put(SealedMembership(item.generation))
                    elif isinstance(item, m.FaultOrdered):
                        self._inbox.put(item)
                generations = [item.proposal.generation for item in event.items if isinstance(item, m.ProposalPut)]
                self._inbox.put(Proposed(generations[0] if generations else None))
            case _:
                pass

    def _hear_peer(self, event: m.PeerHeard | m.PeerRefused) -> None:
        # At the job's end every node goes, and none is lost.
        if isinstance(event, m.PeerRefused) and not self._generations.finished:
            self._journal.emit("peer.lost", peer=event.id.partition("@")[0], evidence=event.evidence)
        if self._member is not None:
            self._member.tell(event)


def _balancing(policy: Policy, health: Watching | None) -> Policy:
    """Return the policy with what the script says of slow nodes."""
    return replace(policy, balance=health is not None and health.act and health.balance)


def _ladder(health: Watching | None) -> MemoryLadder | None:
    """Return what is done where memory runs out; None for nothing."""
    if health is None or health.oom is Exhaustion.OFF:
        return None
    return MemoryLadder(acts=health.act and health.oom is Exhaustion.RECOMPUTE)


def _judge(health: Watching | None) -> Judge | None:
    """Return what finds out, while this node leads, why nothing moves; None where the script wants none of it."""
    if health is None:
        return None

    def judge(generation: Generation, stalls: Mapping[str, Stall], since: float) -> Verdict | None:
        verdict = stuck.judge(generation, stalls, since)
        return verdict if verdict is None or health.act else replace(verdict, act=False)

    return judge

"""One job in virtual time: etcd, a network, trainers, members, and their faults."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from random import Random

from chaos.simulation.checkpoints import Checkpoints
from chaos.simulation.clock import HostClock
from chaos.simulation.durations import Durations
from chaos.simulation.etcd import Client, Etcd, Speeds
from chaos.simulation.etcd_store import ROOT, Change
from chaos.simulation.loop import Loop
from chaos.simulation.network import Network, State
from chaos.simulation.node import Member
from chaos.simulation.trainers import Trainers
from elastic3d import etcd_keys as keys
from elastic3d.errors import LayoutError
from elastic3d.etcd import Put
from elastic3d.membership import actions as acts
from elastic3d.membership import events as e
from elastic3d.membership.machine.situation import Planner
from elastic3d.membership.policy import Policy
from elastic3d.membership.records import Drain, MemberRecord, Notice, Quarantine, ReasonToGoBack, encode
from elastic3d.membership.stalls import Judge
from elastic3d.membership.transactions import BREVITY, Brevity, Transaction
from elastic3d.planner import Plan, plan, plan_below
from elastic3d.rollback import Rollback
from elastic3d.shortfall import MemoryBound
from elastic3d.values import Generation, Layout, ModelProfile, Node, Slot

REJOIN = 0.2
"""Seconds in which the owner of an evicted member builds a new one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The settings of a job. steps: how many a generation commits before it idles, 0 for no limit.

    durations: of what trainers do, instead of build and step. brevity: when its generations are written as changes.
    judge: says why nothing moves, None where no ranks are watched. planner: plans instead of the one that knows no
    costs. layout: asked for. stored: a generation resumes from the newest checkpoint if memory holds no newer step.
    """

    policy: Policy
    profile: ModelProfile
    speeds: Speeds = field(default_factory=Speeds)
    slots: int = 1
    build: tuple[float, float] = (0.1, 0.6)
    step: float = 0.7
    steps: int = 0
    labels: bool = False
    brevity: Brevity = BREVITY
    judge: Judge | None = None
    durations: Durations | None = None
    planner: Planner | None = None
    layout: Layout = field(default_factory=Layout)
    stored: bool = False


class Observer:
    """An observer of a job; every method is optional."""

    def began(self, member: Member) -> None:
        """A process started."""

    def ended(self, member: Member) -> None:
        """A process ended, whichever way."""

    def changed(self, changes: list[Change]) -> None:
        """Etcd's keys changed, in one revision."""

    def rolled_back(self) -> None:
        """Etcd was rolled back to the keys of an earlier time."""

    def acted(self, member: Member, action: acts.Action) -> None:
        """A core acted."""

    def restored(self, generation: Generation, before: int, step: int, made: int) -> None:
        """All trainers of a generation resume after `step`, made in generation `made`; the newest step made until then
        is `before`.
        """

    def stepped(self, generation: Generation, step: int) -> None:
        """A generation made a step."""

    def stuck(self, member: Member, key: str) -> None:
        """A rank of this node stands still in the generation `key`."""

    def convicted(self, member: Member, generation: Generation, clean: int, seconds: float) -> None:
        """A device of this node was convicted in this generation; audits vouch for `clean` steps.

        seconds: after which the nodes hear of it.
        """

    def spiked(self, generation: Generation, rollback: Rollback) -> None:
        """The loss jumped up in this generation, and all its nodes say so."""


class World:
    """Everything of one simulated job. Hosts are numbered from 1; a host runs one process at a time."""

    def __init__(self, setting: Setting, seed: int, *, traced: bool = False) -> None:
        self.setting = setting
        self.policy = setting.policy
        self.loop = Loop()
        self.random = Random(f"world {seed}")
        self.etcd = Etcd(self.loop, Random(f"etcd {seed}"), setting.speeds)
        self.network = Network(self.loop, Random(f"network {seed}"))
        self.checkpoints = Checkpoints(self.loop, Random(f"checkpoints {seed}"))
        self.trainers = Trainers(
            self.loop, Random(f"trainers {seed}"), self.network, self.checkpoints,
            durations=setting.durations or Durations(build=setting.build, step=setting.step),
            steps=setting.steps, restored=self._restored, stepped=self._stepped, stored=self._stored,
            profile=setting.profile, watched=setting.judge is not None,
        )  # fmt: skip
        self.members: dict[int, Member] = {}
        self.by_id: dict[str, Member] = {}
        self.observers: list[Observer] = []
        self.trace = hashlib.sha256() if traced else None
        self.lines: list[str] | None = None
        self.generation: Generation | None = None
        self.ended = False
        self.written_at = 0.0
        self._operator = Client(server=0)
        self.etcd.on_change = self._changed

    # Members.

    def planner(
        self,
        nodes: int,
        record: MemberRecord,
        present: Layout | None,
        speeds: Sequence[float] = (),
        bound: MemoryBound | None = None,
        counts: Collection[int] | None = None,
    ) -> Plan:
        """Plan as a keeper does."""
        if self.setting.planner is not None:
            return self.setting.planner(nodes, record, present, speeds, bound, counts)
        given = (nodes, len(record.node.slots), self.setting.profile, self.setting.layout)
        if bound is None:
            return plan(*given, previous=present, speeds=speeds, counts=counts)
        return plan_below(bound, *given, previous=present, speeds=speeds, counts=counts)

    def active(self, count: int) -> int:
        """Return how many of so many nodes can train, by policy and by the layout asked for, 0 for none."""
        used = self.policy.allowed(count)
        if not used or not self.setting.layout.pp:
            return used
        counts = self.policy.numbers(used)
        try:
            return plan(used, self.setting.slots, self.setting.profile, self.setting.layout, counts=counts).nodes
        except LayoutError:
            return 0

    def start(self, host: int, said: tuple[ReasonToGoBack, ...] = ()) -> Member | None:
        """Start a process on a host that has none. said: by the incarnation before, and not heard yet."""
        known = self.members.get(host)
        if known is not None and known.alive:
            return None
        labels = {}
        if self.setting.labels:
            labels = {"zone": f"z{host % 3}", "rack": f"r{host // 40}", "switch": f"s{host // 400}"}
        node = Node(
            name=f"n{host}",
            incarnation=f"{self.random.getrandbits(48):012x}",
            address=f"10.{host >> 16 & 255}.{host >> 8 & 255}.{host & 255}",
            slots=tuple(Slot(tile_port=self.random.randint(32768, 60999)) for _ in range(self.setting.slots)),
            heartbeat_port=self.random.randint(32768, 60999),
            store_port=self.random.randint(32768, 60999),
            labels=labels,
            home=f"n{host}" if self.setting.labels else "",
        )
        clock = HostClock(self.loop, origin=self.random.uniform(10, 1e6), skew=self.random.uniform(-300, 300))
        record = MemberRecord(node=node, profile=self.setting.profile)
        member = Member(self, host, record, clock, said)
        self.members[host] = member
        self.by_id[member.id] = member
        self._note(member, "starts")
        for observer in self.observers:
            observer.began(member)
        member.start()
        return member

    def member(self, host: int) -> Member | None:
        """Return the living process of a host."""
        member = self.members.get(host)
        return member if member is not None and member.alive else None

    def alive(self) -> list[Member]:
        """Return all living processes, by host."""
        return [self.members[host] for host in sorted(self.members) if self.members[host].alive]

    def end(self, member: Member, state: State) -> None:
        """End a process abruptly."""
        if member.alive:
            member.end(state)
            self._note(member, state)
            for observer in self.observers:
                observer.ended(member)

    def closed(self, member: Member) -> None:
        """A process ended by itself; one that may rejoin comes back."""
        self._note(member, "closed")
        for observer in self.observers:
            observer.ended(member)
        if member.exit is not None and member.exit.rejoin:
            self.loop.later(REJOIN, self._rejoin, member)

    def _rejoin(self, member: Member) -> None:
        if self.members[member.host] is member and not self.ended:
            again = self.start(member.host, member.core.report.goes_back)
            if again is not None:
                self.trainers.snapshots.inherited(member.id, again.id)

    def acted(self, member: Member, action: acts.Action) -> None:
        """Note a core's action before it is executed."""
        self._note(member, action)
        for observer in self.observers:
            observer.acted(member, action)

    def _restored(self, generation: Generation, before: int, step: int, made: int) -> None:
        for observer in self.observers:
            observer.restored(generation, before, step, made)

    def _stepped(self, generation: Generation, step: int) -> None:
        for observer in self.observers:
            observer.stepped(generation, step)

    def _stored(self) -> tuple[int, int]:
        if not self.setting.stored or not self.checkpoints.committed:
            return 0, 0
        made, step = self.checkpoints.committed[-1]
        return step, made

    # Etcd.

    def _changed(self, changes: list[Change]) -> None:
        self.written_at = self.loop.now
        for change in changes:
            event = change.event
            if isinstance(event, e.GenerationPut):
                self.generation = event.generation
            elif isinstance(event, e.EndPut):
                self.ended = True
            if self.lines is not None:
                kind = type(event).__name__
                size = change.size
                detail = ""
                if isinstance(event, e.GenerationPut | e.ProposalPut):
                    formed = event.generation if isinstance(event, e.GenerationPut) else event.proposal.generation
                    nodes = " ".join(n.name for n in formed.nodes)
                    detail = f" {formed.key} {formed.cause} [{nodes}] {formed.detail}"
                self.lines.append(f"{self.loop.now:9.4f} etcd {change.revision} {kind} {change.key} {size}{detail}")
        for observer in self.observers:
            observer.changed(changes)

    def put(self, key: str, record: object, seconds: float | None = None) -> None:
        """Write as an operator does, under a lease that expires if `seconds` are given."""

        def write(lease: int) -> None:
            operation = Put(ROOT + key, encode(record), lease)
            self.etcd.send(self._operator, Transaction(conditions=(), operations=(operation,)), lambda answer: None)

        if seconds is None:
            write(0)
        else:
            self.etcd.grant(self._operator, seconds, lambda lease: write(lease.id) if lease else None, kept=False)

    def drain(self, host: int, seconds: float) -> None:
        """Let an operator order a node to leave."""
        self.put(keys.drain(f"n{host}"), Drain(seconds=seconds, reason="maintenance", by="operator"))

    def notice(self, host: int, seconds: float) -> None:
        """Let the cloud notify a node that it has to leave."""
        member = self.member(host)
        if member is not None:
            member.noticed = True
            member.tell(e.Noticed(notice=Notice(kind="aws", seconds=seconds)))

    def stick(self, member: Member) -> None:
        """Let a running trainer of a node stand still, until it is killed or `Trainers.unstick`."""
        key = self.trainers.stick(member)
        if key:
            self._note(member, "stands still")
            for observer in self.observers:
                observer.stuck(member, key)

    def lie(self, member: Member, seconds: float) -> None:
        """Have an audit convict a device of a node, if its trainers run; the nodes hear of it after `seconds`."""
        clean = self.trainers.clean
        generation = self.trainers.lie(member, seconds)
        if generation is not None:
            self._note(member, "computes wrongly")
            for observer in self.observers:
                observer.convicted(member, generation, clean, seconds)

    def spike(self, member: Member) -> None:
        """Have the loss jump up in the generation in which a node trains, if it does."""
        spiked = self.trainers.spike(member)
        if spiked is not None:
            self._note(member, "sees the loss jump up, as all others do")
            for observer in self.observers:
                observer.spiked(*spiked)

    def quarantine(self, host: int, seconds: float) -> None:
        """Let an operator keep a machine out for a time; who is kept out for longer stays so (`membership.orders`)."""
        key = keys.quarantine(f"n{host}")
        there = self.etcd.store.tiers.get(keys.ROLL.strip("/"), {}).get(ROOT + key)
        if there is not None and isinstance(there.event, e.QuarantinePut) and there.event.quarantine.seconds > seconds:
            return
        self.put(key, Quarantine(seconds=seconds, reason="maintenance", by="operator"), seconds)

    def etcd_down(self, down: bool, *, stopped: bool = False) -> None:
        """Take etcd away from everybody, or give it back; killed and restarted, its leases begin anew."""
        self.etcd.up = not down
        if not down and not stopped:
            self.etcd.extend()
        for member in self.alive():
            member.reach()

    def etcd_rolled_back(self, since: float) -> None:
        """Give etcd back to everybody with the data of an earlier time."""
        self.etcd.roll_back(since)
        board = [change.event for change in self.etcd.store.all_of("board")]
        sealed = [event.generation for event in board if isinstance(event, e.GenerationPut)]
        self.generation = sealed[0] if sealed else None
        self.ended = any(isinstance(event, e.EndPut) for event in board)
        for observer in self.observers:
            observer.rolled_back()
        self.etcd_down(False)

    def revoke(self, member: Member) -> None:
        """Revoke a member's lease by hand; it learns of it with its next keepalive."""
        lease = member.lease
        if lease is not None and self.etcd.up:
            self.etcd.revoke(lease)
            self.loop.later(self.random.uniform(0.0, lease.ttl / 4), member.lease_ended, lease)

    # The log of actions, as text and as a digest.

    def _note(self, member: Member, what: object) -> None:
        if self.trace is not None or self.lines is not None:
            line = f"{self.loop.now:9.4f} {member.id} {_short(what)}"
            if self.trace is not None:
                self.trace.update(f"{self.loop.now!r} {member.id} {what!r}\n".encode())
            if self.lines is not None:
                self.lines.append(line)


_TOLD = ("prepared", "left", "finished", "failed", "error", "peer_lost", "step", "silent", "answered")


def _short(what: object) -> str:
    match what:
        case acts.PutReport():
            report = what.report
            words = {
                name: value
                for name in (
                    "prepared",
                    "left",
                    "finished",
                    "failed",
                    "error",
                    "peer_lost",
                    "step",
                    "silent",
                    "answered",
                )
                if (value := getattr(report, name))
            }
            return f"PutReport {words}"
        case acts.Seal() | acts.Prepare() | acts.StartTrainers():
            nodes = " ".join(node.name for node in what.generation.nodes)
            return f"{type(what).__name__} {what.generation.key} {what.generation.cause} [{nodes}]"
        case acts.Propose():
            formed = what.proposal.generation
            return f"Propose {formed.key} [{' '.join(n.name for n in formed.nodes)}] switch={what.proposal.switch}"
        case acts.WatchPeers():
            return f"Watch {' '.join(peer.id for peer in what.peers)} expected {' '.join(what.expected)}"
        case acts.PutMember():
            return "PutMember"
        case _:
            return str(what)

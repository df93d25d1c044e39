"""One large job: nodes that form, die, join and drain, drawn from a seed, or that come and go as in a trace.

Measures the cost of each generation: how long from the event that made it necessary to the last node that trains, and
what went through etcd meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from chaos.simulation.etcd_store import Change
from chaos.simulation.invariants import Checker
from chaos.simulation.network import State
from chaos.simulation.node import Member
from chaos.simulation.trace import Held
from chaos.simulation.world import Observer, Setting, World
from elastic3d.membership import actions as acts
from elastic3d.membership import events as e
from elastic3d.membership.policy import Policy
from elastic3d.values import Generation, ModelProfile

PROFILE = ModelProfile(blocks=64, parameters=10**11, micro_batches=1 << 20, micro_batch=1, digest="job")

SPREAD = 1.0
"""Seconds within which the nodes of a job that starts at once arrive."""

PAUSE = 3.0
"""Seconds of rest before the next disturbance of a job that agrees."""

CALM = 8.0
"""Seconds without a formation after which a trace's next change may come at once: the time between is skipped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Formation:
    """A generation and its cost.

    seconds: from the event that made it necessary to the last active node that trains. etcd_operations, etcd_bytes:
    requests of members, and values written plus changes delivered, since the formation before.
    """

    generation: int
    cause: str
    nodes: int
    seconds: float
    etcd_operations: int
    etcd_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """The outcome of a large job. virtual: seconds that passed for its members."""

    formations: tuple[Formation, ...]
    largest_record_bytes: int
    violations: tuple[str, ...]
    virtual: float


class _Books(Observer):
    """Keeps account of formations."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.formations: list[Formation] = []
        self.largest = 0
        self.newest_at = 0.0
        self._happened: dict[str, float] = {}
        self._due: list[float] = []
        self._current: Generation | None = None
        self._before: dict[str, None] = {}
        self._since = 0.0
        self._waiting: dict[str, None] = {}
        self._spent = (0, 0)

    def began(self, member: Member) -> None:
        """A node came."""
        self._happened[member.id] = self._world.loop.now

    def ended(self, member: Member) -> None:
        """A node is gone."""
        self._happened.setdefault(f"end of {member.id}", self._world.loop.now)

    def drained(self, member: Member) -> None:
        """A node is told to leave."""
        self._happened[f"end of {member.id}"] = self._world.loop.now

    def changed(self, changes: list[Change]) -> None:
        """Look for the largest record, and for seals."""
        for change in changes:
            if change.item is not None:
                self.largest = max(self.largest, len(change.item.value))
            if isinstance(change.event, e.GenerationPut):
                self._sealed(change.event.generation)

    def _sealed(self, formed: Generation) -> None:
        if self._waiting:
            self._close()
        now = self._world.loop.now
        before = self._before
        nodes = dict.fromkeys(node.id for node in formed.nodes)
        lost = [self._happened.get(f"end of {id}") for id in before if id not in nodes]
        joined = [self._happened[id] for id in nodes if id not in before]
        gone = [at for at in lost if at is not None and at <= now]
        # A loss is handled at once; newcomers are waited for.
        self._since = min(gone) if gone else max(joined, default=now)
        self._current, self._before, self._waiting = formed, nodes, dict(nodes)
        self.newest_at = now

    def acted(self, member: Member, action: acts.Action) -> None:
        """Wait for the last node that trains."""
        if (
            isinstance(action, acts.StartTrainers)
            and self._current is not None
            and action.generation.key == self._current.key
        ):
            self._waiting.pop(member.id, None)
            self.newest_at = self._world.loop.now
            if not self._waiting:
                self._close()

    def _close(self) -> None:
        formed, world = self._current, self._world
        assert formed is not None
        operations, size = world.etcd.operations, world.etcd.bytes
        self.formations.append(
            Formation(
                generation=formed.number,
                cause=str(formed.cause),
                nodes=len(formed.nodes),
                seconds=round(world.loop.now - self._since, 4),
                etcd_operations=operations - self._spent[0],
                etcd_bytes=size - self._spent[1],
            )
        )
        self._spent = (operations, size)
        self._waiting = {}


def form(
    nodes: int,
    seed: int,
    *,
    trace: tuple[Held, ...] = (),
    minutes: float | None = None,
    slots: int = 8,
    report: Callable[[float, int], None] = lambda now, formations: None,
) -> Account:
    """Simulate a job of up to `nodes` nodes; stop a trace after `minutes` of it."""
    policy = Policy(minimum=1, maximum=nodes, budget=0, below_minimum=1e9, damping=5.0)
    setting = Setting(policy=policy, profile=PROFILE, slots=slots, build=(0.3, 0.6), step=1.0, steps=2, labels=True)
    job = _Job(World(setting, seed), Random(f"large {seed}"), report)
    if trace:
        job.follow(trace, None if minutes is None else 60 * minutes)
    else:
        job.live(nodes)
    return job.account()


class _Job:
    def __init__(self, world: World, random: Random, report: Callable[[float, int], None]) -> None:
        self.world, self.random, self.report = world, random, report
        self.books = _Books(world)
        self.checker = Checker(world)
        world.observers += [self.books, self.checker]
        self._next_host = 1
        self._touched_at = 0.0

    def live(self, nodes: int) -> None:
        """Form, then let a few nodes die, one join and one drain."""
        self.add(nodes, SPREAD)
        self.rest()
        for how in (State.ENDED, State.VANISHED):
            self.remove(1, how)
            self.rest()
        self.remove(nodes // 100, State.ENDED)
        self.rest()
        self.add(max(1, nodes // 100), SPREAD)
        self.rest()
        self.drain()
        self.rest()
        self.checker.settled(2.0)

    def follow(self, trace: tuple[Held, ...], until: float | None) -> None:
        """Hold as many nodes as the trace says, and skip long quiet times."""
        before = trace[0].at
        for change in trace:
            if until is not None and change.at > until:
                break
            gap = change.at - before
            before = change.at
            self.pass_time(min(gap, CALM + 2.0))
            if gap > CALM:
                self.rest()
            there = len(self.world.alive())
            if change.nodes > there:
                self.add(change.nodes - there, SPREAD)
            elif change.nodes < there:
                self.remove(there - change.nodes, State.ENDED)
        self.rest()

    def add(self, count: int, spread: float) -> None:
        """Let nodes come within a short time."""
        for _ in range(count):
            self.world.loop.later(self.random.uniform(0.0, spread), self.world.start, self._next_host)
            self._next_host += 1
        self.pass_time(spread)
        self._touched_at = self.world.loop.now

    def remove(self, count: int, how: State) -> None:
        """Let nodes die at once."""
        self._touched_at = self.world.loop.now
        self.checker.disturb(self._touched_at)
        there = self.world.alive()
        for member in self.random.sample(there, min(count, len(there))):
            self.world.end(member, how)

    def drain(self) -> None:
        """Let an operator drain a node."""
        there = self.world.alive()
        if not there:
            return
        member = self.random.choice(there)
        self._touched_at = self.world.loop.now
        self.books.drained(member)
        self.world.drain(member.host, 30.0)

    def rest(self) -> None:
        """Let time pass until no generation was formed and nothing written for a while."""
        world = self.world
        latest = world.loop.now + 120.0
        while world.loop.now < latest:
            self.pass_time(0.5)
            quiet = world.loop.now - max(self.books.newest_at, world.written_at, self._touched_at)
            if quiet > (CALM if not self.checker.agreed() else PAUSE):
                return

    def pass_time(self, seconds: float) -> None:
        """Let virtual time pass, and report it."""
        end = self.world.loop.now + seconds
        while self.world.loop.now < end:
            self.world.loop.run(min(end, self.world.loop.now + 0.1))
            self.report(self.world.loop.now, len(self.books.formations))

    def account(self) -> Account:
        """Return the outcome."""
        return Account(
            formations=tuple(self.books.formations),
            largest_record_bytes=self.books.largest,
            violations=tuple(self.checker.violations),
            virtual=self.world.loop.now,
        )

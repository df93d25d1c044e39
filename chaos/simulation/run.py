"""Playing schedules: one, or thousands; a failing one is minimised and printed as text."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from chaos.many import runs as many
from chaos.simulation.invariants import FELT, Checker
from chaos.simulation.network import State
from chaos.simulation.schedule import LEADER, LINKS, STANDING, Command, Do, Job, Schedule, draw, shrink
from chaos.simulation.slowness import UNQUIET
from chaos.simulation.standstills import judge
from chaos.simulation.world import Setting, World
from elastic3d.membership import events as e
from elastic3d.membership.policy import Policy
from elastic3d.membership.transactions import Brevity
from elastic3d.values import Layout, ModelProfile

PROFILE = ModelProfile(blocks=8, parameters=1000, micro_batches=16, micro_batch=2, digest="job")

SETTLE = 40.0
"""Seconds after the last fault within which everything has to settle."""

CHANGES = Brevity(beyond=0, share=math.inf)
"""Generations of these small jobs are written like those of large ones."""

QUIET = 5.0
"""Seconds at the end in which nothing may be written."""

BACKUP = 3.0
"""Seconds between a backup of etcd and the loss that it replaces."""

LATE_CHANGES = 4
"""How often such a change is waited for."""

EVENTS = 400_000
"""Events of one schedule; a job with more never settles."""


@dataclass(slots=True, kw_only=True)
class Outcome:
    """The outcome of one schedule. digest: of everything that happened, if requested."""

    schedule: Schedule
    violations: list[str]
    seals: int
    steps: int
    digest: str = ""
    lines: list[str] = field(default_factory=list)
    out_after: list[tuple[str, float]] = field(default_factory=list)

    @property
    def counts(self) -> dict[str, int]:
        """The counts to be added up over many schedules."""
        return {"generations": self.seals, "steps": self.steps}

    def report(self) -> str:
        """Return text to paste into a test."""
        said = "\n".join(f"# {violation}" for violation in self.violations[:5])
        return f"# seed {self.schedule.job.seed}\n{self.schedule}\n{said}"

    def document(self) -> dict[str, object]:
        """Return the outcome as JSON."""
        fields: dict[str, object] = {"seed": self.schedule.job.seed, "schedule": str(self.schedule)}
        return fields | {"violations": self.violations}


def policy_of(job: Job) -> Policy:
    """Return the policy of random schedules: defaults, with what lasts minutes made short."""
    return Policy(
        minimum=min(job.minimum, job.maximum),
        maximum=job.maximum,
        multiple_of=job.multiple_of,
        beside=job.beside,
        first_gather=0.5,
        orphan=4.0,
        prepare=10.0,
        budget=0,
        damping=2.0,
        quarantine=3.0,
        flap_memory=12.0,
        reach_again=4.0,
        change_cost=1.0,
    )


def play(schedule: Schedule, *, traced: bool = False, lines: bool = False) -> Outcome:
    """Play one schedule to its end and return the outcome."""
    job = schedule.job
    setting = Setting(policy=policy_of(job), profile=PROFILE, steps=30, brevity=CHANGES, judge=judge)
    setting = replace(setting, layout=Layout(pp=job.pp)) if job.pp else setting
    world = World(setting, job.seed, traced=traced)
    if lines:
        world.lines = []
    checker = Checker(world)
    world.observers.append(checker)
    hosts = range(1, 1 + max([job.members, *(node for command in schedule.commands for node in command.nodes)]))
    for host in range(1, job.members + 1):
        world.loop.at(world.random.uniform(0.0, 0.6), world.start, host)
    for command in schedule.commands:
        world.loop.at(command.at, _do, world, checker, command, hosts)
    end = max([3.0, *(command.ends for command in schedule.commands)])
    # Trainers' reports of steps are no unrest.
    world.loop.at(end + SETTLE / 2, setattr, world.trainers, "steps", 1)
    try:
        _advance(world, checker, end + SETTLE)
        for _ in range(LATE_CHANGES):
            # A change for slow nodes, or the way back, comes whenever it pays.
            if checker.slow.busy:
                _advance(world, checker, world.loop.now + UNQUIET)
        checker.settled(QUIET)
    except Exception as error:
        checker.violated(f"a core raised {type(error).__name__}: {error}")
        if lines:
            raise
    return Outcome(
        schedule=schedule,
        violations=checker.violations,
        seals=checker.seals,
        steps=world.trainers.committed,
        digest=world.trace.hexdigest() if world.trace else "",
        lines=world.lines or [],
        out_after=checker.out_after,
    )


def _advance(world: World, checker: Checker, until: float) -> None:
    for _ in range(EVENTS):
        due = world.loop.next_at()
        if due is None or due > until:
            world.loop.run(until)
            return
        world.loop.step()
    checker.violated(f"more than {EVENTS} events in {world.loop.now:.1f} s: it does not come to rest")


def _do(world: World, checker: Checker, command: Command, hosts: range) -> None:
    """Execute a command, and tell the checker what it means."""
    seconds = command.seconds
    # The effect of a dead link is over once the job goes on without one of the two.
    checker.disturb(command.at if command.do in LINKS else command.ends)
    if command.do not in (Do.LIE, Do.SPIKE):
        checker.hinder(command.ends)
    if command.do not in STANDING:
        checker.interfere(command.ends)
    leader = next((m.host for m in world.alive() if m.core.leads), 0)
    chosen = tuple(host for host in (leader if node == LEADER else node for node in command.nodes) if host in hosts)
    others = tuple(host for host in hosts if host not in chosen)
    for host in chosen:
        _do_to(world, checker, command, host)
    match command.do:
        case Do.CUT | Do.ISOLATE | Do.MUTE | Do.DEAFEN:
            if command.do is not Do.DEAFEN:
                _for_a_time(world, checker, seconds, world.network.block, world.network.free, chosen, others)
            if command.do is not Do.MUTE:
                _for_a_time(world, checker, seconds, world.network.block, world.network.free, others, chosen)
        case Do.UNLINK | Do.ONE_WAY:
            senders = chosen if command.do is Do.UNLINK else chosen[:1]
            _unlink(world, checker, seconds, senders, chosen)
        case Do.RESET:
            for host in chosen[1:]:
                world.network.reset(chosen[0], host, 1)
                world.loop.later(seconds, world.network.reset, chosen[0], host, -1)
        case Do.ETCD_AWAY | Do.ETCD_STOP:
            stopped = command.do is Do.ETCD_STOP
            if world.etcd.up:
                world.etcd_down(True)
                world.loop.later(seconds, partial(world.etcd_down, False, stopped=stopped))
        case Do.ETCD_EMPTY | Do.ETCD_RESTORE:
            if world.etcd.up:
                since = world.loop.now - BACKUP if command.do is Do.ETCD_RESTORE else -1.0
                world.etcd_down(True)
                world.loop.later(seconds, world.etcd_rolled_back, since)
        case Do.ETCD_ELECT:
            world.etcd.elect(seconds)
        case Do.ETCD_SLOW:
            world.etcd.slow = 2.0
            world.loop.later(seconds, setattr, world.etcd, "slow", 0.0)
        case Do.COMPACT:
            world.etcd.compact()
        case Do.FINISH:
            world.trainers.finish()
        case _:
            pass


def _for_a_time(
    world: World,
    checker: Checker,
    seconds: float,
    begin: Callable[[tuple[int, ...], tuple[int, ...]], None],
    end: Callable[[tuple[int, ...], tuple[int, ...]], None],
    senders: tuple[int, ...],
    receivers: tuple[int, ...],
) -> None:
    def over() -> None:
        end(senders, receivers)
        checker.regard()

    begin(senders, receivers)
    checker.regard()
    world.loop.later(seconds, over)


def _unlink(world: World, checker: Checker, seconds: float, senders: tuple[int, ...], chosen: tuple[int, ...]) -> None:
    """Cut some of these hosts off from the others of them for a time; either may have to stand aside."""

    def over() -> None:
        checker.disturb(world.loop.now)
        checker.linked(chosen)

    _for_a_time(world, checker, seconds, world.network.block, world.network.free, senders, chosen)
    checker.unlinked(chosen)
    world.loop.later(seconds, over)


def _do_to(world: World, checker: Checker, command: Command, host: int) -> None:
    member = world.member(host)
    seconds = command.seconds
    if command.do is Do.START:
        world.start(host)
        return
    if command.do is Do.BROKEN:
        if member is None:
            world.start(host)
            newcomer = world.member(host)
            assert newcomer is not None
            newcomer.raises = True
            checker.broken(newcomer)
        return
    if command.do is Do.DRAIN:
        world.drain(host, seconds)
        return
    if command.do is Do.QUARANTINE:
        world.quarantine(host, seconds)
        return
    if member is None:
        return
    match command.do:
        case Do.KILL:
            world.end(member, State.ENDED)
        case Do.VANISH:
            world.end(member, State.VANISHED)
        case Do.PAUSE:
            if member.state is State.RUNNING:
                why = "stopped" if seconds >= FELT else "stopped for a moment"
                checker.ail(member.id, why)
                member.pause()
                checker.regard()

                def wake() -> None:
                    member.wake()
                    checker.heal(member.id, why)
                    checker.regard()

                world.loop.later(seconds, wake)
        case Do.LEAVE:
            checker.ail(member.id, "asked to leave")
            member.noticed = True
            member.tell(e.LeaveAsked())
        case Do.NOTICE:
            checker.ail(member.id, "drained")
            world.notice(host, seconds)
        case Do.FAIL | Do.ERROR:
            if world.trainers.fail(member, error=command.do is Do.ERROR):
                checker.erred(member, error=command.do is Do.ERROR)
        case Do.LIE:
            world.lie(member, seconds)
        case Do.SPIKE:
            world.spike(member)
        case Do.STICK:
            world.stick(member)
            world.loop.later(seconds, world.trainers.unstick, member)
        case Do.STICKS:
            member.sticks = True
            world.stick(member)

            def well() -> None:
                member.sticks = False
                world.trainers.unstick(member)

            world.loop.later(seconds, well)
        case Do.SLOW:
            member.slow = True
            checker.slow.began(member.record.node.place)
            world.trainers.time()
            world.loop.later(seconds, setattr, member, "slow", False)
        case Do.LOSE | Do.ISOLATE:
            _lose(world, checker, host, seconds)
        case Do.LAG:
            member.client.lag = 1.5
            world.loop.later(seconds, setattr, member.client, "lag", 0.0)
        case Do.UNANSWERED:
            member.deaf = True
        case Do.REVOKE:
            world.revoke(member)
        case _:
            pass


def _lose(world: World, checker: Checker, host: int, seconds: float) -> None:
    """Cut a host off from etcd for a time, whichever process runs there."""
    member = world.member(host)
    assert member is not None
    if seconds >= world.policy.lease / 2:
        checker.ail(member.id, "without etcd")
    member.cuts += 1
    member.reach()

    def over() -> None:
        member.cuts -= 1
        checker.heal(member.id, "without etcd")
        if member.alive:
            member.reach()

    world.loop.later(seconds, over)


def play_many(
    first: int, count: int, *, most: int = 3, played: Callable[[int], None] = lambda done: None
) -> many.Tally[Outcome]:
    """Play the schedules drawn from `count` seeds, from `first` on; stop after `most` failures, and make them small."""
    return many.play_many(lambda seed: play(draw(seed)), smallest, first=first, count=count, most=most, played=played)


def smallest(outcome: Outcome) -> Outcome:
    """Return the outcome of a smaller schedule with a violation of the same kind."""
    return play(shrink(outcome.schedule, many.alike(outcome, play, _kind)))


def _kind(violation: str) -> str:
    """Return the text of a violation without numbers and names."""
    return "".join(c for c in violation.partition(": ")[2] if not c.isdigit())[:24].partition("@")[0]

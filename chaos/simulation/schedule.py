"""Faults of a job and their times: drawn from a seed, written as text, and minimised when a schedule fails.

A schedule is a text of lines, the first of which describes the job, each other one a command:

    job seed=7 members=5 minimum=1 maximum=4 multiple_of=1 beside=1
    3.250 kill n1
    4.000 cut n2,n3 for 2.5
    9.125 etcd-stop for 4.0

Nodes are n1, n2...; `leader` is whoever leads at that moment. A command for a node that does not exist, or no longer
exists, does nothing. Lasting faults end by themselves after the seconds given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from random import Random

from chaos.many import shrinking
from chaos.many.shrinking import with_less
from elastic3d.errors import UsageError


class Do(StrEnum):
    """What can be done to a job."""

    START = "start"  # a node comes; under the name of a dead one, its machine is back
    BROKEN = "broken"  # a node comes whose code raises wherever it trains
    KILL = "kill"  # its process dies, its host refuses
    VANISH = "vanish"  # its host dies
    PAUSE = "pause"  # its process is stopped, and goes on
    LEAVE = "leave"  # it leaves by itself, at once
    NOTICE = "notice"  # it is notified that it has to leave within the time
    DRAIN = "drain"  # an operator wants it to leave within the time
    QUARANTINE = "quarantine"  # an operator keeps the machine out for a time
    FAIL = "fail"  # a trainer dies
    ERROR = "error"  # the user's code raises
    STICK = "stick"  # a running trainer stands still
    STICKS = "sticks"  # every trainer of theirs stands still soon after it started
    LIE = "lie"  # an audit convicts a device of theirs; with a time, all hear of it so much later
    SPIKE = "spike"  # the loss jumps up where they train, and the run goes back
    SLOW = "slow"  # their work takes several times as long
    CUT = "cut"  # these and the others hear nothing of each other
    MUTE = "mute"  # nothing that these send arrives at the others
    DEAFEN = "deafen"  # nothing that the others send arrives at these
    UNLINK = "unlink"  # these do not reach each other, but everybody else reaches them
    ONE_WAY = "one-way"  # nothing that the first of these sends arrives at the others of these
    RESET = "reset"  # a firewall refuses what the first of these dials of the others' heartbeat ports
    ISOLATE = "isolate"  # cut, and without etcd
    LOSE = "lose"  # these do not reach etcd
    LAG = "lag"  # their watches are late
    UNANSWERED = "unanswered"  # etcd accepts their next decision, and the answer is lost
    REVOKE = "revoke"  # somebody ends their leases by hand
    ETCD_AWAY = "etcd-away"  # etcd is killed and restarted: its leases live on
    ETCD_STOP = "etcd-stop"  # etcd is stopped and wakes: leases ran out meanwhile
    ETCD_ELECT = "etcd-elect"  # etcd changes its leader: nothing is committed meanwhile
    ETCD_SLOW = "etcd-slow"  # commits take up to two seconds
    ETCD_EMPTY = "etcd-empty"  # etcd is killed and comes back with no data
    ETCD_RESTORE = "etcd-restore"  # etcd is killed and comes back with slightly older data
    COMPACT = "compact"  # etcd forgets all changes up to now
    FINISH = "finish"  # main returns everywhere


LEADER = 0
"""The number of whoever leads."""

ROLLED_BACK = (Do.ETCD_EMPTY, Do.ETCD_RESTORE)
OF_ETCD = (Do.ETCD_AWAY, Do.ETCD_STOP, Do.ETCD_ELECT, Do.ETCD_SLOW, *ROLLED_BACK)
LASTING = (
    Do.PAUSE, Do.NOTICE, Do.DRAIN, Do.QUARANTINE, Do.CUT, Do.MUTE, Do.DEAFEN, Do.UNLINK, Do.ONE_WAY, Do.RESET,
    Do.ISOLATE, Do.LOSE, Do.LAG, Do.STICK, Do.STICKS, Do.SLOW, *OF_ETCD
)  # fmt: skip
LINKS = (Do.UNLINK, Do.ONE_WAY)
STANDING = (Do.STICK, Do.STICKS)
NOBODYS = (*OF_ETCD, Do.COMPACT, Do.FINISH)


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """Do this at virtual second `at` to these nodes, for so many seconds where it lasts."""

    at: float
    do: Do
    nodes: tuple[int, ...] = ()
    seconds: float = 0.0

    def __str__(self) -> str:
        timed = self.do in LASTING or self.seconds
        who = " " + ",".join(f"n{node}" if node else "leader" for node in self.nodes) if self.nodes else ""
        return f"{self.at:.3f} {self.do}{who}" + (f" for {self.seconds:g}" if timed else "")

    @property
    def ends(self) -> float:
        """When it ends."""
        return self.at + self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The job under test: how many nodes start it, and its policy. pp: pipeline stages asked for, 0 for any number."""

    seed: int
    members: int
    minimum: int = 1
    maximum: int = 8
    multiple_of: int = 1
    beside: bool = True
    pp: int = 0

    def __str__(self) -> str:
        shown = [f.name for f in fields(self) if f.name != "pp" or self.pp]
        return "job " + " ".join(f"{name}={int(getattr(self, name))}" for name in shown)


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A job and its faults, in order of time."""

    job: Job
    commands: tuple[Command, ...]

    def __str__(self) -> str:
        return "\n".join(map(str, (self.job, *self.commands)))


def parse(text: str) -> Schedule:
    """Return the schedule of a text; UsageError where a line is none."""
    job: Job | None = None
    commands = []
    for line in filter(None, map(str.strip, text.splitlines())):
        try:
            first, *words = line.split()
            if first == "job":
                given = {name: int(value) for name, _, value in (word.partition("=") for word in words)}
                job = Job(**given | {"beside": bool(given.get("beside", 1))})  # type: ignore[arg-type]
            else:
                commands.append(_command(float(first), words))
        except (ValueError, TypeError, IndexError):
            raise UsageError(
                f"schedule: {line!r} is no line of a schedule; expected such as `3.250 pause n1,n2 for 2.5`"
            ) from None
    if job is None:
        raise UsageError("schedule: it has no line that begins with `job`")
    return Schedule(job=job, commands=tuple(sorted(commands, key=lambda command: command.at)))


def _command(at: float, words: list[str]) -> Command:
    do, *rest = words
    seconds = 0.0
    if len(rest) >= 2 and rest[-2] == "for":
        seconds = float(rest[-1])
        rest = rest[:-2]
    nodes = (
        tuple(LEADER if name == "leader" else int(name.removeprefix("n")) for name in rest[0].split(","))
        if rest
        else ()
    )
    return Command(at=at, do=Do(do), nodes=nodes, seconds=seconds)


_WEIGHTS = {
    Do.START: 8, Do.KILL: 6, Do.VANISH: 6, Do.PAUSE: 10, Do.LEAVE: 2, Do.NOTICE: 3, Do.DRAIN: 3, Do.QUARANTINE: 2,
    Do.FAIL: 4, Do.ERROR: 1, Do.CUT: 7, Do.MUTE: 3, Do.DEAFEN: 3, Do.ISOLATE: 4, Do.LOSE: 4, Do.LAG: 3,
    Do.UNANSWERED: 3, Do.REVOKE: 2, Do.ETCD_AWAY: 4, Do.ETCD_STOP: 3, Do.ETCD_ELECT: 3, Do.ETCD_SLOW: 2, Do.COMPACT: 5,
    Do.FINISH: 0, Do.BROKEN: 3, Do.STICK: 0, Do.STICKS: 0, Do.LIE: 0, Do.SPIKE: 0, Do.SLOW: 0,
}  # fmt: skip


def draw(seed: int) -> Schedule:
    """Return a random schedule: 3 to 8 nodes and about ten commands within some 25 virtual seconds."""
    random = Random(f"schedule {seed}")
    members = random.randint(2, 7)
    job = Job(
        seed=seed,
        members=members,
        minimum=random.choice((1, 1, 2, 2, 3)),
        maximum=max(4, random.choice((members, members, members - 1, 8))),
        multiple_of=random.choice((1, 1, 1, 1, 2)),
        beside=random.random() < 0.85,
    )
    verbs = list(_WEIGHTS)
    weights = list(_WEIGHTS.values())
    commands = []
    at = 2.0 + random.random()
    newest = members
    for _ in range(random.randint(4, 13)):
        do = random.choices(verbs, weights)[0]
        nodes: tuple[int, ...] = ()
        if do in (Do.START, Do.BROKEN) and (newest < 9 and random.random() < 0.6):
            newest += 1
            nodes = (newest,)
        elif do not in NOBODYS:
            count = 1 if random.random() < 0.65 else random.randint(1, max(1, newest // 2 + 1))
            nodes = tuple(sorted(random.sample(range(1, newest + 1), min(count, newest))))
            if count == 1 and do not in (Do.START, Do.BROKEN) and random.random() < 0.3:
                nodes = (LEADER,)
        commands.append(Command(at=round(at, 3), do=do, nodes=nodes, seconds=_seconds(do, random)))
        # Most commands follow closely, to coincide with the effects of the previous one.
        at += random.choice((random.uniform(0.0, 0.03), random.uniform(0.0, 1.0), random.uniform(0.5, 5.0)))
    if random.random() < 0.05:
        commands.append(Command(at=round(at, 3), do=Do.FINISH))
    elif random.random() < 0.15:
        do = random.choice(ROLLED_BACK)
        when = round(random.uniform(2.0, at), 3)
        commands.append(Command(at=when, do=do, seconds=_seconds(do, random)))
    links = Random(f"links {seed}")  # a separate one, so that all else is drawn as before
    if links.random() < 0.15:
        pair = tuple(links.sample(range(1, newest + 1), 2))
        # Long enough that the job has to go on without one of them, or so short that they may never notice.
        seconds = round(links.choice((links.uniform(1.0, 20.0), links.uniform(60.0, 80.0))), 2)
        do, when = links.choice(LINKS), round(links.uniform(1.0, at), 3)
        commands.append(Command(at=when, do=do, nodes=pair, seconds=seconds))
    resets = Random(f"resets {seed}")
    if resets.random() < 0.15:
        pair = tuple(resets.sample(range(1, newest + 1), 2))
        when, seconds = round(resets.uniform(1.0, at), 3), round(resets.uniform(0.5, 20.0), 2)
        commands.append(Command(at=when, do=Do.RESET, nodes=pair, seconds=seconds))
    layouts = Random(f"layouts {seed}")
    if layouts.random() < 0.2:
        # Fewer nodes may be allowed than a layout needs.
        job = replace(job, pp=layouts.choice((2, 2, 3)))
    sticks = Random(f"sticks {seed}")
    if sticks.random() < 0.3:
        for _ in range(sticks.choice((1, 1, 2, 3))):
            node, when = sticks.choice((LEADER, *range(1, newest + 1))), round(sticks.uniform(2.0, at + 4.0), 3)
            # So short that nobody may do anything about it, around the time when somebody does, or for good.
            often = (sticks.uniform(0.5, 2.5), sticks.uniform(2.8, 4.2), sticks.uniform(8.0, 25.0))
            do = Do.STICKS if sticks.random() < 0.3 else Do.STICK
            seconds = sticks.uniform(15.0, 30.0) if do is Do.STICKS else sticks.choice(often)
            commands.append(Command(at=when, do=do, nodes=(node,), seconds=round(seconds, 2)))
    lies, words = Random(f"lies {seed}"), Random(f"words {seed}")
    if lies.random() < 0.2:
        for _ in range(lies.choice((1, 1, 2))):
            node, when = lies.choice((LEADER, *range(1, newest + 1))), round(lies.uniform(2.0, at + 6.0), 3)
            # Mostly before anything else can have followed, or only after that.
            late = words.choice((0.0, 0.0, words.uniform(0.0, 0.1), words.uniform(0.1, 1.5)))
            commands.append(Command(at=when, do=Do.LIE, nodes=(node,), seconds=round(late, 2)))
    spikes = Random(f"spikes {seed}")
    if spikes.random() < 0.15:
        for _ in range(spikes.choice((1, 1, 2))):
            node, when = spikes.choice((LEADER, *range(1, newest + 1))), round(spikes.uniform(2.0, at + 6.0), 3)
            commands.append(Command(at=when, do=Do.SPIKE, nodes=(node,)))
    slow = Random(f"slow {seed}")
    if slow.random() < 0.2:
        commands += _slow(slow, newest, at)
    return Schedule(job=job, commands=tuple(sorted(commands, key=lambda command: command.at)))


def _slow(random: Random, newest: int, at: float) -> Iterator[Command]:
    """Yield times in which a node is slow: for long, or again and again."""
    node, when = random.randint(1, newest), random.uniform(1.5, at)
    again = random.random() < 0.3
    for _ in range(random.randint(3, 8) if again else random.choice((1, 1, 2))):
        seconds = random.uniform(4.0, 8.0) if again else random.uniform(2.0, 25.0)
        yield Command(at=round(when, 3), do=Do.SLOW, nodes=(node,), seconds=round(seconds, 2))
        when += seconds + random.uniform(2.0, 6.0)


def _seconds(do: Do, random: Random) -> float:
    match do:
        case Do.NOTICE | Do.DRAIN:
            return round(random.uniform(2.0, 12.0), 2)
        case Do.QUARANTINE:
            return round(random.uniform(2.0, 6.0), 2)
        case Do.ETCD_ELECT:
            return round(random.uniform(0.1, 1.5), 2)
        case _ if do in LASTING:
            # Short ones must do no harm.
            return round(random.choice((random.uniform(0.05, 0.7), random.uniform(0.7, 8.0))), 2)
        case _:
            return 0.0


def shrink(schedule: Schedule, fails: Callable[[Schedule], bool], *, tries: int = 300) -> Schedule:
    """Return a smaller schedule that still fails: fewer commands, of fewer nodes, at rounder times."""
    return shrinking.shrink(schedule, _smaller, fails, tries=tries)


def _smaller(schedule: Schedule) -> Iterator[Schedule]:
    commands = schedule.commands
    for fewer in with_less(commands):
        yield replace(schedule, commands=fewer)
    if schedule.job.members > 1:
        yield replace(schedule, job=replace(schedule.job, members=schedule.job.members - 1))
    for at, command in enumerate(commands):
        simpler = [replace(command, nodes=tuple(n for n in command.nodes if n != node)) for node in command.nodes]
        simpler = simpler if len(command.nodes) > 1 else []
        if command.at != round(command.at, 1):
            simpler.append(replace(command, at=round(command.at, 1)))
        if command.seconds != round(command.seconds, 1) and round(command.seconds, 1):
            simpler.append(replace(command, seconds=round(command.seconds, 1)))
        for one in simpler:
            changed = sorted((*commands[:at], one, *commands[at + 1 :]), key=lambda c: c.at)
            yield replace(schedule, commands=tuple(changed))

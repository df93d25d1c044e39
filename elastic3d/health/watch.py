"""The watch of a slot: it looks at its trainers' records four times a second, and reports ranks that stand still.

`assess` is the pure part: what a silent rank is at, and whether its silence is longer than it may be. Silence is the
time since the last tick, less the time in which this process itself did not run: where a machine is suspended or
overloaded, nobody else ran either. Nor does that time count among the gaps from which later deadlines are made.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from elastic3d.clock import SYSTEM, Clock
from elastic3d.health import stacks
from elastic3d.health.deadlines import Allowance, allowance
from elastic3d.health.options import Watching
from elastic3d.health.phases import Axis, Phase
from elastic3d.health.processes import ProcessSample, group_of, others_between, sample
from elastic3d.health.record import WARM, ProgressPage, ProgressRecord, parse
from elastic3d.membership.stalls import AxisCount, RankStall, RankState, Wait

INTERVAL = 0.25
"""Seconds between two looks."""

PAUSE = 0.5
"""Seconds by which a look may itself be late before that time is taken off all silences."""

CALM = 0.5
"""Seconds of silence below which a trainer's processes are not looked at."""

SPAN = 2.0
"""Seconds of its silence over which what a trainer's processes do is judged."""

SHARE = 0.1
"""Share of a processor above which processes are busy."""

SOME_BYTES = 4096
"""Bytes read or written within `SPAN` above which processes are busy."""

BEAT_LATE = 1.0
"""Seconds without a beat after which no thread of the trainer gets to run Python."""

EACH = 0.5
"""Least seconds between two reports of one rank."""

AHEAD = 1.0
"""Seconds by which a record's times may lie ahead of this process's clock, which is the same one."""

_NOWHERE = "an unknown place: its progress record was written over"

_COMPUTING = (Phase.FORWARD, Phase.BACKWARD, Phase.WEIGHTS, Phase.REDUCE, Phase.VOTE, Phase.UPDATE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Assessment:
    """A rank's stall, and whether it has been silent for longer than a rank may be that does what it does."""

    stall: RankStall
    over: bool


def assess(
    rank: int, record: ProgressRecord, samples: Sequence[ProcessSample], *, now: float, lost: float, watching: Watching
) -> Assessment:
    """Say what a rank is at. samples: of its processes, oldest first, all of its present silence, at least one.

    now: monotonic seconds. lost: those within its silence in which this process did not run.
    """
    silent = max(0.0, now - record.at / 1e9 - lost)
    beat = max(0.0, now - record.beat / 1e9 - lost)
    last = samples[-1]
    first = next((one for one in reversed(samples) if last.at - one.at >= SPAN), samples[0])
    known = last.at - first.at >= SPAN
    others_cpu, others_io = others_between(first, last)
    cpu, io = last.cpu - first.cpu + others_cpu, last.io - first.io + others_io
    share = SHARE * 1000 * max(last.at - first.at, INTERVAL)
    busy = cpu + last.queued - first.queued >= share or io >= SOME_BYTES
    allowed = allowance(record, watching)
    if last.state in ("T", "t") and record.phase is not Phase.PAUSE:
        # Nothing that takes long explains it: no compilation, no store.
        allowed = Allowance(idle=watching.stuck, busy=watching.stuck, named=watching.stuck)
    state = RankState.BUSY if busy else RankState.IDLE
    if last.state in ("T", "t"):
        state = RankState.STOPPED
    elif last.state == "D" and not busy and all(one.state == "D" for one in [*samples][-4:]):
        state = RankState.BLOCKED
    elif beat >= BEAT_LATE and (not busy or silent >= allowed.busy):
        state = RankState.HELD
    limit = allowed.named if record.wait is not None else allowed.busy if busy else allowed.idle
    stall = RankStall(
        rank=rank,
        step=record.step,
        made=record.made,
        phase=record.phase.name.lower(),
        silent=round(1000 * silent),
        allowed_idle=round(1000 * allowed.idle),
        allowed_busy=round(1000 * allowed.busy),
        beat=round(1000 * beat),
        state=state,
        cpu=max(0, cpu),
        io=max(0, io),
        chunk=record.chunk,
        unit=record.unit,
        axes=record.axes,
        wait=record.wait,
        odd=record.odd,
        wchan=last.wchan,
        loader_moves=others_cpu >= share or others_io >= SOME_BYTES,
        source=record.source,
    )
    return Assessment(stall=stall, over=silent >= limit and (known or state is RankState.STOPPED))


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """What was taken of a rank that stands still, before anything was done to it. page: the whole record.

    stacks: of all its threads, "" where it could not write them.
    """

    trainer: int
    generation: str
    pid: int
    stall: RankStall
    page: bytes
    stacks: str = ""


@dataclass(slots=True, kw_only=True)
class _Watched:
    trainer: int
    generation: str
    rank: int
    tensor: bool
    pid: int
    page: ProgressPage
    gaps: Sequence[int]
    ticks: int = -1
    lost: float = 0.0
    followed: bool = False
    silent: bool = False  # and its keeper knows
    unread: tuple[int, int] | None = None  # ticks and their time in a record that cannot be read
    unread_at: float = 0.0  # and since when they are so
    asked: bool = False  # for stacks
    stacks: str = ""
    samples: deque[ProcessSample] = field(default_factory=lambda: deque(maxlen=16))
    others: tuple[int, ...] = ()
    others_at: float = 0.0
    reported_at: float = 0.0
    reported: object = None


class SlotWatch:
    """Watches the trainers of one slot. `run` is for a thread of its own; the rest may be called from any.

    silent: called with a trainer's number, its stall, and whether its silence is over what it may be; again when what
    it says has changed. moving: called when such a rank moves again. taken: called with what was taken of a rank when
    its silence was first over, and again with its stacks. unreadable: called once for a trainer, with why its record
    says nothing: it was written over. While it is, its rank is taken to be in the script's own code, and to move when
    ticks do. None of them is called after `end`.
    """

    def __init__(
        self,
        *,
        watching: Watching,
        silent: Callable[[int, RankStall, bool], None],
        moving: Callable[[int], None],
        taken: Callable[[Taken], None] = lambda taken: None,
        unreadable: Callable[[str], None] = lambda why: None,
        clock: Clock = SYSTEM,
    ) -> None:
        self._watching, self._silent, self._moving, self._taken, self._clock = watching, silent, moving, taken, clock
        self._unreadable = unreadable
        self._lock = threading.Lock()
        self._watched: dict[int, _Watched] = {}
        self._looked_at = clock.monotonic()
        self._over = threading.Event()

    def begin(
        self, trainer: int, *, pid: int, rank: int, generation: str, page: ProgressPage, tensor: bool = False
    ) -> None:
        """Watch a trainer from now on: it has been let go.

        generation: the key of its generation. tensor: its layers are cut by tensor parallelism.
        """
        with self._lock:
            self._watched[trainer] = _Watched(
                trainer=trainer,
                generation=generation,
                rank=rank,
                tensor=tensor,
                pid=pid,
                page=page,
                gaps=page.gaps(),
            )

    def follow(self, trainer: int, on: bool) -> None:
        """Report what a trainer is at whether it is silent or not, or no longer: its node has a silent rank."""
        with self._lock:
            watched = self._watched.get(trainer)
            if watched is not None:
                watched.followed, watched.reported = on, None

    def end(self, trainer: int, *, hurt: bool | None) -> None:
        """Watch a trainer no more, since it has ended. Its page must still be open.

        hurt: it ended by itself or by somebody else's signal, and not because it was done: its last record is reported.
        False: it was stopped, so that its record only completes that of its node's. None: no record is of use.
        """
        with self._lock:
            watched = self._watched.pop(trainer, None)
            if watched is None or hurt is None:
                return
            page = watched.page.copy()
            record = parse(page)
            if record is None:
                return
            # No time of this process is known to be lost since the trainer ended: it is not silent, but dead.
            at = self._clock.monotonic()
            gone = [*watched.samples] or [ProcessSample(at=at, state="")]
            seen = assess(watched.rank, record, gone, now=at, lost=watched.lost, watching=self._watching).stall
            stall = replace(_with_stacks(seen, watched, record), state=RankState.DEAD)
            if hurt:
                self._take(watched, stall, page)
            self._silent(trainer, stall, hurt)

    def run(self) -> None:
        """Look until `close`."""
        while not self._over.wait(INTERVAL):
            self.look()

    def close(self) -> None:
        """End `run`."""
        self._over.set()

    def look(self) -> None:
        """Look at every trainer once."""
        with self._lock:
            now = self._clock.monotonic()
            late = now - self._looked_at - INTERVAL
            self._looked_at = now
            for watched in self._watched.values():
                self._look(watched, now, late if late >= PAUSE else 0.0)

    def _look(self, watched: _Watched, now: float, lost: float) -> None:
        """Look at one trainer. lost: seconds since the last look in which this process did not run."""
        ticks, at = watched.page.ticked()
        sound = at / 1e9 <= now + AHEAD
        watched.lost += lost
        if sound and ticks != watched.ticks:
            if watched.lost:
                # Its deadlines would otherwise be longer by several times as much, for some hundreds of steps.
                watched.page.forgive(watched.lost, watched.gaps)
            watched.gaps = watched.page.gaps()
            # It may have ticked last just before that time, so that its silence has no more of it than it lasts.
            watched.lost = min(lost, max(0.0, now - at / 1e9))
            watched.ticks, watched.asked, watched.stacks = ticks, False, ""
            watched.samples.clear()
            if watched.silent:
                watched.silent, watched.reported = False, None
                self._moving(watched.trainer)
        if sound and now - at / 1e9 - watched.lost < CALM and not watched.followed:
            return
        page = watched.page.copy()
        record = parse(page) if sound else None
        if record is None:
            if not ticks:
                return
            record = self._unknown(watched, (ticks, at), now)
        if now - watched.others_at >= SPAN:
            watched.others, watched.others_at = group_of(watched.pid), now
        # What is used of the processor is a share of the time in which anybody could use it.
        watched.samples.append(sample(watched.pid, watched.others, now - watched.lost))
        seen = assess(watched.rank, record, watched.samples, now=now, lost=watched.lost, watching=self._watching)
        if not seen.over and not watched.followed:
            return
        if seen.over:
            self._ask_stacks(watched, record, seen.stall)
        stall = _with_stacks(seen.stall, watched, record)
        if record.phase is Phase.USER and watched.unread == (ticks, at):
            stall = replace(stall, top_frame=_NOWHERE)
        if seen.over:
            watched.silent = True
        said = _said(stall, seen.over)
        if said != watched.reported and now - watched.reported_at >= EACH:
            if seen.over:
                self._take(watched, stall, page)
            watched.reported, watched.reported_at = said, now
            self._silent(watched.trainer, stall, seen.over)

    def _unknown(self, watched: _Watched, seen: tuple[int, int], now: float) -> ProgressRecord:
        """Return the record of a rank whose own one cannot be read, and say so once.

        seen: what is where ticks and their time should be. While that does not change the rank makes no progress, and
        while it stands still it would otherwise be the one of which no verdict knows.
        """
        if watched.unread is None:
            self._unreadable(
                f"the progress record of rank {watched.rank} was written over, and says nothing: only whether the rank "
                "moves at all is known while that is so. Something in its process writes to memory that is not its own"
            )
        if watched.unread != seen:
            watched.unread, watched.unread_at = seen, now
            watched.samples.clear()
            if watched.silent:
                # What was said of the rank before does not hold any more.
                watched.silent, watched.reported = False, None
                self._moving(watched.trainer)
        at = round(1e9 * watched.unread_at)
        return ProgressRecord(ticks=0, at=at, beat=round(1e9 * now), phase=Phase.USER, step=-1, made=WARM)

    def _ask_stacks(self, watched: _Watched, record: ProgressRecord, stall: RankStall) -> None:
        if watched.stacks or not record.caught or stall.state is RankState.STOPPED:
            return
        if not watched.asked:
            watched.asked = True
            stacks.ask(watched.pid, watched.page.stacks)
            watched.stacks = stacks.answer(watched.page.stacks, self._clock)
        else:
            watched.stacks = stacks.answer(watched.page.stacks, self._clock, 0.0)

    def _take(self, watched: _Watched, stall: RankStall, page: bytes) -> None:
        self._taken(
            Taken(
                trainer=watched.trainer,
                generation=watched.generation,
                pid=watched.pid,
                stall=stall,
                page=page,
                stacks=watched.stacks,
            )
        )


def _with_stacks(stall: RankStall, watched: _Watched, record: ProgressRecord) -> RankStall:
    """Add what a rank's stacks show: where it is, and that it waits in a collective which it has not recorded.

    How many of those there were is not known; so a rank waits in the first of them, and others have posted none. Where
    it is, is then where that collective was called.
    """
    stall = replace(stall, top_frame=stacks.top_frame(watched.stacks, record.thread))
    if record.wait is not None or not stacks.in_collective(watched.stacks, record.thread):
        return stall
    stall = replace(stall, top_frame=stacks.calling_frame(watched.stacks, record.thread) or stall.top_frame)
    axis = Axis.TP if watched.tensor and record.phase in _COMPUTING else Axis.USER
    count = AxisCount(axis=axis.name.lower(), posted=1, done=0)
    return replace(stall, axes=(*stall.axes, count), wait=Wait(axis=count.axis, number=1))


def _said(stall: RankStall, over: bool) -> object:
    """Return what of a stall makes it worth another report: all but measures that change with time alone."""
    return (
        replace(stall, silent=0, beat=0, cpu=0, io=0),
        over,
        stall.silent >= stall.allowed_idle,
        stall.silent >= stall.allowed_busy,
    )

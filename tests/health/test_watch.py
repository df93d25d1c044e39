"""What the watch of a slot says of ranks, from their records and what the kernel says of their processes."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from chaos.machine.processes import wait_until
from elastic3d.clock import SYSTEM
from elastic3d.health import stacks
from elastic3d.health.options import Watching
from elastic3d.health.phases import Axis, Phase
from elastic3d.health.processes import ProcessSample, group_of, others_between, sample, stat_fields
from elastic3d.health.record import SIZE, ProgressPage, ProgressRecord, ProgressWriter, parse
from elastic3d.health.watch import INTERVAL, SlotWatch, Taken, _Watched, _with_stacks, assess
from elastic3d.membership.stalls import AxisCount, RankStall, RankState, Wait

SECOND = 1_000_000_000


def record(**changes: Any) -> ProgressRecord:
    usual = ProgressRecord(ticks=1, at=0, beat=99 * SECOND // 10, phase=Phase.FORWARD, step=9, made=9)
    return replace(usual, **changes)


def samples(*, seconds: float = 2.5, state: str = "S", **grown: int) -> list[ProcessSample]:
    """Samples over the last seconds before 10.0, each number grown by as much in all."""
    number = round(seconds / INTERVAL)
    return [
        ProcessSample(
            at=10.0 - seconds + index * INTERVAL,
            state=state,
            **{name: whole * index // number for name, whole in grown.items()},
        )
        for index in range(number + 1)
    ]


def seen(present: ProgressRecord, of: Sequence[ProcessSample], *, silent: float = 10.0, lost: float = 0.0) -> Any:
    return assess(0, replace(present, at=int((10.0 - silent) * SECOND)), of, now=10.0, lost=lost, watching=Watching())


def test_a_rank_that_does_nothing_is_over_after_three_seconds() -> None:
    """One that computes has ten times as long."""
    assert seen(record(), samples(), silent=2.9).over is False
    idle = seen(record(), samples(), silent=3.0)
    assert (idle.over, idle.stall.state, idle.stall.silent) == (True, RankState.IDLE, 3000)
    busy = seen(record(), samples(cpu=1000))
    assert (busy.over, busy.stall.state) == (False, RankState.BUSY)


@pytest.mark.parametrize("grown", [{"cpu": 300}, {"queued": 300}, {"io": 1 << 20}], ids=str)
def test_a_rank_that_computes_reads_or_wants_a_processor_is_busy(grown: dict[str, int]) -> None:
    """One that is ready to run and gets no processor, since others have them, does not stand still."""
    assert seen(record(), samples(**grown)).stall.state is RankState.BUSY
    few = {name: number // 300 for name, number in grown.items()}
    assert seen(record(), samples(**few)).stall.state is RankState.IDLE


def test_states_of_the_kernel_show() -> None:
    """Stopped at once; blocked in the kernel if it is so in several samples."""
    assert seen(record(beat=0), samples(state="T")).stall.state is RankState.STOPPED
    assert seen(record(), samples(state="T", seconds=0.25)).over
    # The watch keeps them in a queue of bounded length.
    assert seen(record(), deque(samples(state="D"))).stall.state is RankState.BLOCKED
    once = [*samples(), replace(samples()[-1], state="D", at=10.0)]
    assert seen(record(), once).stall.state is RankState.IDLE


def test_a_stopped_rank_is_given_no_time_for_what_it_was_at() -> None:
    """A restore or the first steps may take minutes; but a process that is stopped does none of it."""
    for phase in (Phase.START, Phase.RESTORE, Phase.DATA, Phase.FORWARD):
        first = record(phase=phase, made=0)
        assert not seen(first, samples()).over
        stopped = seen(first, samples(state="T"))
        assert (stopped.over, stopped.stall.allowed_idle) == (True, 3000)
    assert not seen(record(phase=Phase.PAUSE, pause=600.0), samples(state="T")).over


def test_a_held_interpreter_shows_by_its_beat() -> None:
    """While that computes it is given the time of those that compute."""
    assert seen(record(beat=8 * SECOND), samples()).stall.state is RankState.HELD
    assert seen(record(beat=8 * SECOND), samples(cpu=2000)).stall.state is RankState.BUSY


def test_time_that_the_keeper_lost_is_forgiven() -> None:
    """Silence and the beat both: nobody ran."""
    there = seen(record(beat=SECOND * 9 // 10), samples(), lost=9.0)
    assert (there.over, there.stall.silent, there.stall.state) == (False, 1000, RankState.IDLE)


def test_too_short_a_look_says_nothing_yet() -> None:
    """What processes do is judged over two seconds."""
    assert not seen(record(), samples(seconds=1.0)).over


def test_who_waits_is_named_early_whatever_it_does() -> None:
    """Its own deadline is another one: a wait that its steps have had before."""
    waits = record(wait=Wait(axis="dp", number=2), longest_wait=30.0)
    stall = seen(waits, samples(cpu=2000))
    assert (stall.over, stall.stall.allowed_idle) == (True, 120_000)


@pytest.mark.parametrize("tensor", [True, False])
def test_a_rank_within_a_collective_that_it_did_not_record_waits(tensor: bool, trainer: Trainer) -> None:
    """Its stack shows it: such as those of tensor parallelism, and of the script."""
    stack = (
        'Thread 0x00000000000000aa (most recent call first):\n  File "/x/user.py", line 3 in other\n'
        "Current thread 0x00000000000000ab (most recent call first):\n"
        '  File "/x/torch/distributed/distributed_c10d.py", line 3009 in all_reduce\n'
        '  File "/x/torch/distributed/c10d_logger.py", line 83 in wrapper\n  File "/x/user.py", line 7 in main\n'
    )
    page = trainer.page
    watched = _Watched(
        trainer=1, generation="1.0", rank=0, tensor=tensor, pid=trainer.pid, page=page, gaps=page.gaps(), stacks=stack
    )
    stall = seen(record(thread=0xAB), samples()).stall
    stuck = _with_stacks(stall, watched, record(thread=0xAB))
    assert stuck.top_frame == "user.py:7 in main"
    assert stuck.wait == Wait(axis="tp" if tensor else "user", number=1)
    assert stuck.axes == (AxisCount(axis="tp" if tensor else "user", posted=1, done=0),)
    assert _with_stacks(stall, watched, record(thread=0xAA)).wait is None


def test_processes_of_a_group_are_compared_one_by_one() -> None:
    """One that came in between does not bring its past along."""
    first = ProcessSample(at=0.0, state="S", others=((5, 100, 1000),))
    last = ProcessSample(at=2.0, state="S", others=((5, 150, 1000), (6, 90000, 9)))
    assert others_between(first, last) == (50, 0)
    loader = [replace(first, at=7.5), replace(last, at=10.0, others=((5, 400, 1000),))]
    assert seen(record(phase=Phase.DATA), loader).stall.loader_moves


def test_the_kernel_says_what_a_process_does() -> None:
    """Of this one, for instance."""
    mine = sample(os.getpid(), (), SYSTEM.monotonic())
    assert mine.state == "R"
    assert mine.cpu > 0
    assert os.getpid() not in group_of(os.getpgrp()) or os.getpgrp() != os.getpid()
    assert sample(2**22 + 1, (), 0.0).state == ""


@dataclass
class Told:
    """What a watch said."""

    silent: list[tuple[RankStall, bool]] = field(default_factory=list)
    moving: list[int] = field(default_factory=list)
    taken: list[Taken] = field(default_factory=list)


class Hands:
    """A clock that tests set."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Trainer:
    """A process that does nothing, with a page to which the test writes in its place."""

    def __init__(self, clock: Hands) -> None:
        self.page = ProgressPage()
        self.memory = mmap.mmap(self.page.page, SIZE)
        self.writer = ProgressWriter(memoryview(self.memory), lambda: int(clock.now * SECOND))
        self.pid = os.fork()
        if self.pid == 0:
            time.sleep(600)
            os._exit(0)
        # Until it sleeps it waits for a processor, on a busy machine as long as a busy rank.
        assert wait_until(lambda: stat_fields(self.pid)[:1] == ["S"], 60)
        for step in range(1, 4):
            self.writer.step(step)
        self.writer.phase(Phase.FORWARD)

    def end(self) -> None:
        os.kill(self.pid, 9)
        os.waitpid(self.pid, 0)
        del self.writer
        self.memory.close()
        self.page.close()


@pytest.fixture
def clock() -> Hands:
    return Hands()


@pytest.fixture
def trainer(clock: Hands) -> Iterator[Trainer]:
    made = Trainer(clock)
    yield made
    made.end()


@pytest.fixture
def said() -> Told:
    return Told()


@pytest.fixture
def watch(clock: Hands, trainer: Trainer, said: Told) -> SlotWatch:
    watch = SlotWatch(
        watching=Watching(),
        silent=lambda number, stall, over: said.silent.append((stall, over)),
        moving=said.moving.append,
        taken=said.taken.append,
        clock=clock,
    )
    watch.begin(1, pid=trainer.pid, rank=5, generation="2.0", page=trainer.page)
    return watch


def pass_time(watch: SlotWatch, trainer: Trainer, clock: Hands, seconds: float) -> None:
    for _ in range(round(seconds / INTERVAL)):
        clock.now += INTERVAL
        trainer.writer.beat(caught=False)
        watch.look()


def test_a_silent_rank_is_reported_once_until_something_changes(
    watch: SlotWatch, trainer: Trainer, clock: Hands, said: Told
) -> None:
    """And again when it moves. What was taken of it goes along."""
    pass_time(watch, trainer, clock, 2.5)
    assert said.silent == []
    pass_time(watch, trainer, clock, 5.0)
    ((stall, over),) = said.silent
    assert (stall.rank, stall.step, stall.phase, stall.state, over) == (5, 3, "forward", RankState.IDLE, True)
    assert 3000 <= stall.silent < 3500
    assert [(taken.generation, taken.pid) for taken in said.taken] == [("2.0", trainer.pid)]
    pass_time(watch, trainer, clock, 25.0)
    assert len(said.silent) == 2, "it is now silent for longer than a busy rank may be"
    trainer.writer.tick()
    pass_time(watch, trainer, clock, 1.0)
    assert said.moving == [1]
    assert len(said.silent) == 2


def test_a_process_whose_name_is_no_text_gives_its_stacks(trainer: Trainer) -> None:
    """The kernel cuts the name that a script gives its process, within a letter too; a watch that fell over it would
    never get to say that its rank stands still."""
    code = (
        "import faulthandler, signal, time; open('/proc/self/comm', 'wb').write(b'mod\\xc3'); "
        f"faulthandler.register(signal.SIGUSR2, file={trainer.page.stacks}); print(flush=True); time.sleep(600)"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, pass_fds=[trainer.page.stacks]) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            stacks.ask(process.pid, trainer.page.stacks)
            assert "hread 0x" in stacks.answer(trainer.page.stacks, SYSTEM, 60.0)
        finally:
            process.kill()


def test_a_rank_that_is_followed_is_reported_though_it_moves(
    watch: SlotWatch, trainer: Trainer, clock: Hands, said: Told
) -> None:
    """So that its node can say what all of its ranks are at."""
    watch.follow(1, True)
    pass_time(watch, trainer, clock, 0.25)
    ((stall, over),) = said.silent
    assert (stall.silent, over) == (250, False)
    trainer.writer.enter(Axis.DP, 4)
    pass_time(watch, trainer, clock, 1.0)
    assert said.silent[-1][0].wait == Wait(axis="dp", number=1, fingerprint=4)
    watch.follow(1, False)
    reports = len(said.silent)
    trainer.writer.tick()
    pass_time(watch, trainer, clock, 1.0)
    assert len(said.silent) == reports
    assert said.moving == []


def test_nobody_is_blamed_for_time_in_which_the_keeper_did_not_run(
    watch: SlotWatch, trainer: Trainer, clock: Hands, said: Told
) -> None:
    """A machine that was suspended for a minute: after it, everybody has three seconds more."""
    pass_time(watch, trainer, clock, 1.0)
    clock.now += 60.0
    pass_time(watch, trainer, clock, 1.5)
    assert said.silent == []
    pass_time(watch, trainer, clock, 2.0)
    ((stall, _),) = said.silent
    assert stall.silent < 4000


def silent_after_three_seconds(watch: SlotWatch, trainer: Trainer, clock: Hands, said: Told) -> int:
    """Let time pass until the rank is reported, and no sooner; return the milliseconds that it has been silent for."""
    pass_time(watch, trainer, clock, 2.75)
    assert said.silent == []
    pass_time(watch, trainer, clock, 1.0)
    ((stall, _),) = said.silent
    return stall.silent


def test_time_that_the_keeper_lost_is_forgiven_to_those_that_ticked_just_before(
    watch: SlotWatch, trainer: Trainer, clock: Hands, said: Told
) -> None:
    """As nearly all do, whose ticks are milliseconds apart: none of these is looked at before the machine stops."""
    pass_time(watch, trainer, clock, 1.0)
    clock.now += 0.1
    trainer.writer.phase(Phase.BACKWARD)
    clock.now += 60.0
    assert silent_after_three_seconds(watch, trainer, clock, said) < 4000


def test_a_tick_after_the_keeper_lost_time_is_the_beginning_of_a_silence(
    watch: SlotWatch, trainer: Trainer, clock: Hands, said: Told
) -> None:
    """Where only the keeper did not run, no more is forgiven than there is."""
    pass_time(watch, trainer, clock, 1.0)
    clock.now += 60.0
    trainer.writer.phase(Phase.BACKWARD)
    assert 3000 <= silent_after_three_seconds(watch, trainer, clock, said) < 4000


@pytest.mark.parametrize("wakes", ["before its keeper", "after its keeper"])
@pytest.mark.parametrize("waits", [True, False])
def test_a_suspended_machine_makes_no_later_deadline_longer(
    watch: SlotWatch, trainer: Trainer, clock: Hands, said: Told, waits: bool, wakes: str
) -> None:
    """What it was at took no minute: whoever does nothing after that has no four minutes for it."""
    writer = trainer.writer
    pass_time(watch, trainer, clock, 1.0)
    if waits:
        number = writer.enter(int(Axis.WORLD), 7)
    pass_time(watch, trainer, clock, 0.5)
    clock.now += 60.0
    if wakes == "after its keeper":
        pass_time(watch, trainer, clock, 0.5)
    if waits:
        writer.leave(int(Axis.WORLD), number)
    writer.phase(Phase.BACKWARD)
    pass_time(watch, trainer, clock, 0.5)
    seen = parse(trainer.page.copy())
    assert seen is not None
    assert max(*seen.longest.values(), seen.longest_wait) < 3.0
    writer.phase(Phase.FORWARD)
    pass_time(watch, trainer, clock, 8.0)
    assert [stall.allowed_idle < 10_000 for stall, _ in said.silent] == [True]


def test_gaps_go_on_to_be_noted_after_some_of_one_was_forgiven(
    watch: SlotWatch, trainer: Trainer, clock: Hands
) -> None:
    """Shorter ones than that which the suspended machine made, too."""
    writer = trainer.writer
    pass_time(watch, trainer, clock, 1.0)
    number = writer.enter(int(Axis.WORLD), 7)
    clock.now += 60.0
    writer.leave(int(Axis.WORLD), number)
    pass_time(watch, trainer, clock, 0.5)
    writer.step(4)
    writer.phase(Phase.FORWARD)
    number = writer.enter(int(Axis.WORLD), 7)
    pass_time(watch, trainer, clock, 8.0)
    writer.leave(int(Axis.WORLD), number)
    pass_time(watch, trainer, clock, 9.0)
    writer.tick()
    seen = parse(trainer.page.copy())
    assert seen is not None
    assert (seen.longest_wait, seen.longest[Phase.FORWARD]) == (8.0, 9.0)


@pytest.mark.parametrize("hurt", [True, False, None])
def test_the_last_record_of_a_trainer_outlives_it(
    watch: SlotWatch, trainer: Trainer, clock: Hands, said: Told, hurt: bool | None
) -> None:
    """If it ended by itself; if it was stopped, for completeness; and not at all where it was done."""
    number = trainer.writer.enter(Axis.SHARD, 8)
    watch.end(1, hurt=hurt)
    if hurt is None:
        assert said.silent == []
    else:
        ((stall, over),) = said.silent
        assert (stall.state, stall.wait, over) == (
            RankState.DEAD,
            Wait(axis="shard", number=number, fingerprint=8),
            hurt,
        )
    assert len(said.taken) == (hurt is True)
    pass_time(watch, trainer, clock, 5.0)
    assert len(said.silent) == (hurt is not None)


@pytest.mark.parametrize("word", [1, 2, 14], ids=["time", "phase", "version"])
def test_a_record_that_was_written_over_is_told_once_and_its_rank_named_where_it_stands_still(
    word: int, trainer: Trainer, clock: Hands, said: Told
) -> None:
    """What was said of its rank before is taken back, its end is no trouble, and others are watched as ever.

    Nobody knows what the rank is at: it has the time that the script's own code has.
    """
    told: list[str] = []
    watch = SlotWatch(
        watching=Watching(),
        silent=lambda number, stall, over: said.silent.append((stall, over)),
        moving=said.moving.append,
        taken=said.taken.append,
        unreadable=told.append,
        clock=clock,
    )
    other = Trainer(clock)
    try:
        watch.begin(1, pid=trainer.pid, rank=5, generation="2.0", page=trainer.page)
        watch.begin(2, pid=other.pid, rank=6, generation="2.0", page=other.page)
        pass_time(watch, trainer, clock, 4.0)
        assert {stall.rank for stall, _ in said.silent} == {5, 6}
        said.silent.clear()
        memoryview(trainer.memory).cast("Q")[word] = (1 << 64) - 1
        other.writer.phase(Phase.BACKWARD)
        pass_time(watch, other, clock, 5.0)
        assert sorted(said.moving) == [1, 2]
        assert {stall.rank for stall, _ in said.silent} == {6}
        pass_time(watch, other, clock, 50.0)
        assert {stall.rank for stall, _ in said.silent} == {6}
        pass_time(watch, other, clock, 10.0)
        ((stall, over),) = [one for one in said.silent if one[0].rank == 5]
        assert (over, stall.state, stall.phase, stall.wait) == (True, RankState.IDLE, "user", None)
        assert "written over" in stall.top_frame
        (why,) = told
        assert "rank 5 was written over" in why
        watch.end(1, hurt=True)
        assert {stall.rank for stall, _ in said.silent} <= {5, 6}
    finally:
        other.end()

"""The page of a trainer's progress: what is written is what is read, by another process and from a dead one too."""

from __future__ import annotations

import json
import mmap
import os
import signal
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic3d.health import sheet, stacks
from elastic3d.health.phases import Axis, Phase
from elastic3d.health.record import (
    RING,
    SIZE,
    WARM,
    WINDOW,
    ProgressPage,
    ProgressRecord,
    ProgressWriter,
    fingerprint,
    parse,
    programs,
    steps,
)
from elastic3d.membership.stalls import AxisCount, Wait
from elastic3d.values import to_json

SECOND = 1_000_000_000


class Page:
    """A page, its writer and a clock that tests set."""

    def __init__(self) -> None:
        self.now = SECOND
        self.memory = mmap.mmap(-1, SIZE)
        self.writer = ProgressWriter(memoryview(self.memory), lambda: self.now)

    def read(self) -> ProgressRecord:
        record = parse(self.memory[:])
        assert record is not None
        return record

    def after(self, seconds: float) -> ProgressWriter:
        self.now += int(seconds * SECOND)
        return self.writer

    def steps(self, number: int, gap: float = 0.0) -> None:
        for _ in range(number):
            self.writer.phase(Phase.FORWARD)
            self.after(gap).tick()
            self.writer.step(self.read().made + 1)


@pytest.fixture
def page() -> Page:
    return Page()


def test_a_page_that_nobody_has_written_to_says_nothing() -> None:
    """A trainer that has not begun, or one of another version."""
    assert parse(bytes(SIZE)) is None


def test_what_a_rank_is_at_is_read_back(page: Page) -> None:
    """Phase, step, chunk and unit, time of the last tick, and the wait with its number."""
    page.writer.phase(Phase.BACKWARD)
    page.after(0.5).tick(chunk=3, unit=7)
    page.writer.step(12)
    page.after(0.25)
    done = page.writer.enter(Axis.WORLD, 5)
    page.writer.leave(Axis.WORLD, done)
    number = page.writer.enter(Axis.SHARD, 77)
    record = page.read()
    assert (record.phase, record.chunk, record.unit, record.step, record.made) == (Phase.BACKWARD, 3, 7, 12, 1)
    assert record.at == page.now
    assert record.wait == Wait(axis="shard", number=number, fingerprint=77)
    assert record.axes == (
        AxisCount(axis="world", posted=1, done=1, fingerprint=5),
        AxisCount(axis="shard", posted=1, done=0, fingerprint=77),
    )
    page.writer.leave(Axis.SHARD, number)
    assert page.read().wait is None


def test_what_is_posted_may_be_waited_for_later(page: Page) -> None:
    """Two exchanges are under way; the first is waited for, and a later one that is done covers those before it."""
    first, second = page.writer.post(Axis.DP, 1), page.writer.post(Axis.DP, 2)
    assert (first, second) == (1, 2)
    assert page.read().wait is None
    page.writer.wait(Axis.DP, first, 1)
    assert page.read().wait == Wait(axis="dp", number=1, fingerprint=1)
    page.writer.leave(Axis.DP, second)
    page.writer.leave(Axis.DP, first)
    assert page.read().axes == (AxisCount(axis="dp", posted=2, done=2, fingerprint=2),)


def test_the_longest_gap_is_kept_by_phase_and_waits_apart(page: Page) -> None:
    """What a rank itself takes is not mixed up with what it waits for; the first steps do not count."""
    page.steps(WARM, gap=50.0)
    page.writer.phase(Phase.FORWARD)
    page.after(0.75).tick()
    number = page.writer.enter(Axis.WORLD, 1)
    page.after(2.0)
    page.writer.leave(Axis.WORLD, number)
    record = page.read()
    assert record.longest[Phase.FORWARD] == pytest.approx(0.75)
    assert record.longest_wait == pytest.approx(2.0)
    assert record.longest[Phase.DATA] == 0.0


def test_a_gap_is_forgotten_after_two_windows(page: Page) -> None:
    """One step that took long is remembered for as long as a window at least, and not for ever."""
    page.steps(WARM)
    page.steps(1, gap=3.0)
    page.steps(WINDOW, gap=0.1)
    assert page.read().longest[Phase.FORWARD] == pytest.approx(3.0)
    page.steps(WINDOW, gap=0.1)
    assert page.read().longest[Phase.FORWARD] == pytest.approx(0.1)


def a_step(page: Page, *marks: int, kind: int = 9, ends: bool = True) -> None:
    page.writer.begin_step(kind)
    for mark in marks:
        page.writer.leave(Axis.DP, page.writer.enter(Axis.DP, mark))
    if ends:
        page.writer.step(page.read().made + 1)


def test_a_step_that_begins_like_the_last_one_is_not_odd(page: Page) -> None:
    """Whatever is done between two steps; and of a whole step its program is known."""
    a_step(page, 1, 2, 3)
    page.writer.enter(Axis.WORLD, 99)
    a_step(page, 1, 2, ends=False)
    assert page.read().odd == ""
    assert [mark for _, mark in programs(page.memory[:])[0]] == [9, 1, 2]
    assert [mark for _, mark in programs(page.memory[:])[1]] == [9, 1, 2, 3]


@pytest.mark.parametrize("marks", [(2,), (1, 3), (1, 2, 3, 4)], ids=["skipped", "reordered", "one more"])
def test_a_step_unlike_the_last_one_says_where(page: Page, marks: tuple[int, ...]) -> None:
    """A rank's own last step is what its present one is held to."""
    a_step(page, 1, 2, 3)
    a_step(page, *marks, ends=False)
    assert f"operation {len(marks)} of this step" in page.read().odd


def test_steps_of_two_kinds_are_not_compared(page: Page) -> None:
    """A step of more micro-batches is another program."""
    a_step(page, 1, 2, 3)
    a_step(page, 5, kind=10, ends=False)
    assert page.read().odd == ""


def test_a_step_longer_than_the_ring_is_not_judged(page: Page) -> None:
    """Where the beginning of a program is lost there is nothing to compare with."""
    a_step(page, *range(1, RING + 10))
    a_step(page, 5, ends=False)
    assert programs(page.memory[:])[1] == ()
    assert page.read().odd == ""


def test_a_pause_says_how_long_and_why(page: Page) -> None:
    """Until another phase begins; one within another takes the longer of both."""
    before = page.writer.pause("evaluation ä" * 10, 600.0)
    record = page.read()
    assert (record.phase, record.pause) == (Phase.PAUSE, 600.0)
    assert record.why.startswith("evaluation ä")
    page.writer.pause("within", 5.0)
    assert page.read().pause == 600.0
    page.writer.phase(before)
    assert (page.read().phase, page.read().pause, page.read().why) == (Phase.START, 0.0, "")


@given(st.lists(st.integers(min_value=0, max_value=1 << 50), max_size=6), st.integers(min_value=0, max_value=9))
def test_fingerprints_are_equal_for_equal_operations_and_never_zero(numbers: list[int], kind: int) -> None:
    """0 stands for an operation that has none."""
    assert 0 < fingerprint(kind, *numbers) == fingerprint(kind, *numbers) < 1 << 63


def in_child(work: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    return pid


def test_a_record_is_read_from_another_process_after_its_death() -> None:
    """The memory is the keeper's, so that a killed trainer's last words are there."""
    page = ProgressPage()

    def work() -> None:
        writer = ProgressWriter(memoryview(mmap.mmap(page.page, SIZE)))
        writer.step(4)
        writer.enter(Axis.DP, 3)
        os.kill(os.getpid(), signal.SIGKILL)

    os.waitpid(in_child(work), 0)
    record = parse(page.copy())
    assert record is not None
    assert (record.step, record.wait) == (4, Wait(axis="dp", number=1, fingerprint=3))
    assert page.ticked() == (record.ticks, record.at)
    page.close()


def test_only_who_catches_the_signal_is_asked_for_stacks() -> None:
    """Its default action kills: a process that does not catch it is left alone."""
    from elastic3d.clock import SYSTEM

    page = ProgressPage()
    ready, told_ready = os.pipe()
    go, told_go = os.pipe()

    def work() -> None:
        os.read(go, 1)
        stacks.write_stacks_to(page.stacks)
        os.write(told_ready, b"r")
        os.read(go, 1)

    pid = in_child(work)
    stacks.ask(pid, page.stacks)
    assert stacks.answer(page.stacks, SYSTEM, 0.05) == ""
    os.write(told_go, b"g")
    os.read(ready, 1)
    stacks.ask(pid, page.stacks)
    text = stacks.answer(page.stacks, SYSTEM, 10.0)
    assert " in work" in text
    thread = int(text.partition("0x")[2].partition(" ")[0], 16)
    assert stacks.top_frame(text, thread).startswith("test_record.py:")
    assert stacks.top_frame(text, thread + 1) == ""
    os.write(told_go, b"g")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    for descriptor in (ready, told_ready, go, told_go):
        os.close(descriptor)
    page.close()


def test_a_step_is_written_in_numbers(page: Page) -> None:
    """Seconds in each phase and in waits, which are no part of a phase; eight steps make a row of means."""
    writer = page.writer
    for step in range(1, 3 * sheet.EVERY + 1):
        writer.phase(Phase.DATA)
        page.after(0.125)
        writer.in_script(read=1000 * step)
        for chunk in range(2):
            writer.phase(Phase.FORWARD)
            writer.tick(chunk=chunk)
            page.after(0.5)
            writer.enter_blocks()
            page.after(0.25)
            number = writer.enter(Axis.FROM_PREVIOUS, 7)
            page.after(0.5)
            writer.leave(Axis.FROM_PREVIOUS, number)
            page.after(0.125)
            writer.leave_blocks(3)
            page.after(0.125)
            writer.phase(Phase.BACKWARD)
            # Blocks that compute their forward pass again do so in their backward pass.
            writer.enter_blocks()
            page.after(0)
            writer.leave_blocks(3)
            writer.tick(chunk=chunk)
            page.after(2)
        writer.phase(Phase.VOTE)
        number = writer.post(Axis.WORLD, 7)
        page.after(0.25)
        writer.wait(Axis.WORLD, number, 7)
        page.after(0.25)
        writer.leave(Axis.WORLD, number)
        writer.phase(Phase.USER)
        page.after(step / 8)
        writer.step(step)
        assert writer.row(5.0)[:2] == ((5.0, 2.0) if step >= 2 * sheet.EVERY else ()), "the first steps are not usual"
    row = sheet.sheet_of(writer.row(5.0))
    assert row == sheet.StepSheet(
        work=5.0,
        rounds=2,
        forward=2,
        backward=4,
        data=0.125,
        update=0.25,
        host=20.5 / 8,
        wait_pp=1,
        wait_other=0.25,
        block=0.125,
        read=20_500,
    )
    assert sheet.sheet_of(row.row) == row
    newest, numbers = steps(page.memory[:])[-1]
    assert newest == 3 * sheet.EVERY
    assert (numbers["rounds"], numbers["forward"], numbers["wait_from_previous"]) == (2, 2 * SECOND, SECOND)


def test_a_row_is_of_whole_eights_only(page: Page) -> None:
    """A generation that begins in the middle of one has none until the end of the next; rows that stand for nothing."""
    for step in range(13, 33):
        page.writer.phase(Phase.FORWARD)
        page.after(1).tick(chunk=0)
        page.writer.step(step)
        assert bool(page.writer.row(1.0)) == (step >= 24)
    assert sheet.sheet_of(()) is None
    assert sheet.sheet_of((0.0,) * sheet.WIDTH) is None


@given(st.lists(st.tuples(st.integers(0, SIZE // 8 - 1), st.integers(0, (1 << 64) - 1)), max_size=12), st.binary())
def test_a_page_that_was_written_over_is_no_record_or_a_plain_one(stores: list[tuple[int, int]], run: bytes) -> None:
    """Whatever the trainer's own code leaves in it, the keeper goes on, and what it says can be written as JSON."""
    page = Page()
    page.steps(3)
    page.writer.begin_step(1)
    page.writer.enter(Axis.WORLD, 7)
    words = memoryview(page.memory).cast("Q")
    for at, value in stores:
        words[at] = value
    # Low words decide what is read: a run of bytes from the beginning on meets them all.
    page.memory[: len(run)] = run
    copy = page.memory[:]
    words.release()
    record = parse(copy)
    programs(copy)
    steps(copy)
    if record is not None:
        json.dumps(to_json(record.axes))
        assert record.phase in Phase


@pytest.mark.parametrize("word", [2, 8, 16, 17, 1], ids=["phase", "axis", "posted", "done", "time"])
def test_what_no_writer_writes_is_no_record(page: Page, word: int) -> None:
    """A phase, an axis, counts and times that there are not."""
    page.steps(3)
    memoryview(page.memory).cast("Q")[word] = (1 << 64) - 1
    assert parse(page.memory[:]) is None

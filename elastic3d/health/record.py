"""The page in which a trainer records what it is at, shared with its keeper: its layout, its writer and its reader.

The page is a memfd that the trainer inherits beside its snapshots' memory. Its keeper can read it while the trainer is
stopped, spins, or holds the interpreter's lock, and after the trainer has died. All of it are aligned 64-bit words,
whose stores are never torn. The count of ticks is stored last, so that what belongs to a tick is there when it shows. A
reader copies the page and parses the copy.

    words          what is there
    0 to 15        ticks, time of the last, phase, step, steps made here, chunk, unit, beat, the wait, operations in all
    16 to 79       for each axis: operations posted, done, fingerprint of the last one posted, when it was posted
    80 to 111      longest gaps between ticks by phase, in two windows of 256 steps; the last place is that of waits
    112 to 119     why the script pauses, UTF-8
    128 to 6271    ring of the last 3,072 operations: steps made and axis, fingerprint
    6272 to 7807   the last 64 steps in numbers, 24 words each: step, time of its end, forward passes, then nanoseconds
                   in each phase and in waits along each axis; waits are no part of a phase
    7808 to 8191   what the processes that load samples wait for, see `elastic3d.source_waits`

Numbers that may be -1 are stored with 1 added. The steps' own operations, from the beginning of their passes on, are in
the ring, in the order in which they were posted: a rank's last step is the program that the present one is held to.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from elastic3d import threads
from elastic3d.clock import SYSTEM, nanoseconds
from elastic3d.health import stacks
from elastic3d.health.device_times import DeviceTimes, MadeStep
from elastic3d.health.phases import Axis, Phase
from elastic3d.health.sheet import EVERY, SHEET_WORDS, SHEETS, Row, SheetWriter, StepTimes, steps_of
from elastic3d.membership.stalls import AxisCount, Wait
from elastic3d.source_waits import PLACES, WORDS, longest_awaited

if TYPE_CHECKING:
    from elastic3d.devices import Stopwatch

SIZE = 64 << 10
"""Bytes of a page."""

VERSION = 2
BEAT = 0.2
"""Seconds between two beats."""

WINDOW = 256
"""Steps of one window of longest gaps; the last two are kept."""

WARM = 2
"""Steps of a generation whose gaps do not count: they compile, allocate and connect."""

RING = 3072
_TICKS, _AT, _PHASE, _STEP, _MADE, _CHUNK, _UNIT, _BEAT = range(8)
_WAIT_AXIS, _WAIT_NUMBER, _WAIT_FINGERPRINT, _POSTED, _PAUSE, _THREAD, _VERSION, _CAUGHT = range(8, 16)
_AXES, _AXIS_WORDS = 16, 4
_GAPS, _PHASES = 80, 16
_WAITS = _PHASES - 1
_NOTE, _NOTE_WORDS = 112, 8
_RING = 128
_SHEETS = _RING + 2 * RING
_AWAITED = _SHEETS + SHEETS * SHEET_WORDS
_BEGIN = 0xFFFF
"""Stands where a ring's entry has its axis, for the beginning of a step; the fingerprint is the kind of the step."""

_WORD = (1 << 64) - 1
_MOST = 1 << 62
"""More than any count of operations, and than the nanoseconds of 146 years."""

_FORWARD = int(Phase.FORWARD)


def fingerprint(operation: int, *numbers: int) -> int:
    """Return a number that two operations share only if they are alike, never 0: by its kind, and by sizes and dtypes.

    Equal in all processes: hashes of tuples of integers are not seeded.
    """
    return hash((operation, *numbers)) & (_WORD >> 1) or 1


class ProgressWriter:
    """The trainer's end, a `port.Progress`. For one thread at a time; only the beat has another.

    page: writable memory of `SIZE` bytes. now: nanoseconds of the monotonic clock. `awaited`: the part of the page that
    is for `source_waits.record_in`.
    """

    def __init__(self, page: memoryview, now: Callable[[], int] = nanoseconds) -> None:
        self._bytes, self._words, self._now = page.cast("B"), page.cast("B").cast("Q"), now
        self._ticks = self._head = self._made = 0
        self._phase = int(Phase.START)
        self._recording = False
        self._longest = self._longest_wait = 0
        self._gaps = _GAPS
        self._at = now()
        # What the present step went into; of the present phase since `_since`, less the waits in it.
        self._times, self._since, self._awaited = StepTimes(), self._at, 0
        self._block_at = 0
        self._device: DeviceTimes | None = None
        self._sheets = SheetWriter(self._words[_SHEETS : _SHEETS + SHEETS * SHEET_WORDS])
        self.awaited = self._words[_AWAITED : _AWAITED + PLACES * WORDS]
        self._words[_THREAD] = threading.main_thread().ident or 0
        self._words[_AT] = self._words[_BEAT] = self._at
        self._words[_VERSION] = VERSION

    def beat(self, *, caught: bool) -> None:
        """Note that a thread of this process runs Python. caught: SIGUSR2 writes stacks, and kills nobody."""
        self._words[_CAUGHT] = caught
        self._words[_BEAT] = self._now()

    def measure_by(self, stopwatch: Stopwatch | None, failed: Callable[[Exception], None]) -> None:
        """Have steps measured on a device, not by the host; None where the host's clock will do.

        failed: called once if the device's time cannot be had any more, and nothing is measured from then on.
        """
        self._device = DeviceTimes(stopwatch, self._phase, failed) if stopwatch is not None else None
        self._sheets.behind = int(self._device is not None)

    def phase(self, phase: int) -> None:
        """Note that another phase begins."""
        words = self._words
        self._tick()
        at = self._at
        self._times.spent[self._phase] += at - self._since - self._awaited
        self._since, self._awaited, self._block_at = at, 0, 0
        words[_CHUNK] = words[_UNIT] = 0
        words[_PHASE] = self._phase = int(phase)
        if self._device is not None:
            self._device.phase(self._phase)
        self._longest = words[self._gaps + phase]

    def loading(self) -> None:
        """Note that the data loader is waited for."""
        self.phase(Phase.DATA)

    def in_script(self, read: int = 0) -> None:
        """Note that the script's own code goes on. read: bytes that the samples which it was given were made of."""
        self._times.read += read
        self.phase(Phase.USER)

    def tick(self, *, chunk: int = -1, unit: int = -1) -> None:
        """Note that work goes on."""
        words = self._words
        if chunk >= 0:
            words[_CHUNK] = chunk + 1
            self._times.rounds += self._phase == _FORWARD
        if unit >= 0:
            words[_UNIT] = unit + 1
        self._tick()

    def enter_blocks(self) -> None:
        """Note that a stage's blocks are entered."""
        self._tick()
        self._block_at = self._at - self._awaited if self._phase == _FORWARD else 0
        if self._device is not None and self._block_at:
            self._device.blocks(inside=True)

    def leave_blocks(self, number: int) -> None:
        """Note that so many blocks have been passed since."""
        self._tick()
        if self._block_at:
            self._times.blocks += self._at - self._awaited - self._block_at
            self._times.passes += number
            self._block_at = 0
            if self._device is not None:
                self._device.blocks(inside=False)

    def begin_step(self, kind: int) -> None:
        """Note that the passes of a step begin, and record its operations from here on."""
        self._recording = True
        self._remember(_BEGIN, kind)

    def step(self, step: int) -> None:
        """Note that the `step`-th step of the run was made."""
        words = self._words
        self._recording = False
        self._made += 1
        if self._made == WARM or self._made % WINDOW == 0:
            self._gaps = _GAPS + self._made // WINDOW % 2 * _PHASES
            for at in range(_GAPS if self._made == WARM else self._gaps, self._gaps + _PHASES):
                words[at] = 0
            self._longest = 0
        # Its reader forgives what a suspended machine has added.
        self._longest_wait = words[self._gaps + _WAITS]
        words[_MADE] = self._made
        words[_STEP] = step + 1
        self._tick()
        self._times.spent[self._phase] += self._at - self._since - self._awaited
        self._since, self._awaited = self._at, 0
        self._measured(step, fresh=self._made < EVERY + WARM)
        self._times = StepTimes()

    def spent(self, phase: int) -> float:
        """Return the seconds of the step under way that went to a phase, by the host's clock, without waits."""
        spent = self._times.spent[phase]
        if phase == self._phase:
            spent += self._now() - self._since - self._awaited
        return max(0, spent) / 1e9

    def _measured(self, step: int, *, fresh: bool) -> None:
        times = self._times
        if self._device is None:
            self._sheets.stepped(step, self._at, times, fresh=fresh)
            return
        self._device.step(
            MadeStep(step=step, at=self._at, rounds=times.rounds, passes=times.passes, read=times.read, fresh=fresh)
        )
        if step % EVERY == 0:
            # A row that is late counts only as long as the votes that it belongs to.
            self._sheets.row = ()
        for made, spent in self._device.read():
            self._sheets.stepped(made.step, made.at, spent, fresh=made.fresh)

    def row(self, work: float) -> Row:
        """Return the means over the last whole eight steps, see `health.sheet`; () if there are none yet."""
        return (work, *self._sheets.row) if self._sheets.row else ()

    def enter(self, axis: int, fingerprint: int) -> int:
        """Note that the next operation of an axis is posted and waited for; return its number."""
        number = self.post(axis, fingerprint)
        words = self._words
        words[_WAIT_NUMBER] = number
        words[_WAIT_FINGERPRINT] = fingerprint
        words[_WAIT_AXIS] = axis + 1
        if self._device is not None:
            self._device.wait(axis)
        return number

    def post(self, axis: int, fingerprint: int) -> int:
        """Note that the next operation of an axis is posted; return its number."""
        words, place = self._words, _AXES + axis * _AXIS_WORDS
        if self._recording:
            self._remember(axis, fingerprint)
        self._tick()
        words[place + 2] = fingerprint
        words[place + 3] = self._at
        words[place] = number = words[place] + 1
        return number

    def wait(self, axis: int, number: int, fingerprint: int) -> None:
        """Note that an operation posted before is waited for."""
        words = self._words
        self._tick()
        words[_WAIT_NUMBER] = number
        words[_WAIT_FINGERPRINT] = fingerprint
        words[_WAIT_AXIS] = axis + 1
        if self._device is not None:
            self._device.wait(axis)

    def leave(self, axis: int, number: int) -> None:
        """Note that an operation is done, and those of its axis before it."""
        words = self._words
        words[_WAIT_AXIS] = 0
        place = _AXES + axis * _AXIS_WORDS + 1
        if number > words[place]:
            words[place] = number
        now = self._now()
        gap = now - self._at
        if gap > self._longest_wait:
            self._longest_wait = words[self._gaps + _WAITS] = gap
        self._times.waited[axis] += gap
        self._awaited += gap
        self._at = words[_AT] = now
        self._ticks = words[_TICKS] = self._ticks + 1
        if self._device is not None:
            self._device.leave()

    def pause(self, why: str, seconds: float) -> int:
        """Note that nothing may be heard for up to `seconds`; return the phase that it interrupts."""
        before, words = self._phase, self._words
        most = int(seconds * 1000)
        if before == Phase.PAUSE:
            most = max(most, words[_PAUSE])
        said = why.encode()[: 8 * _NOTE_WORDS].decode(errors="ignore").encode()
        self._bytes[8 * _NOTE : 8 * (_NOTE + _NOTE_WORDS)] = said.ljust(8 * _NOTE_WORDS, b"\0")
        words[_PAUSE] = most
        self.phase(Phase.PAUSE)
        return before

    def _tick(self) -> None:
        words, now = self._words, self._now()
        gap = now - self._at
        if gap > self._longest:
            self._longest = words[self._gaps + self._phase] = gap
        self._at = words[_AT] = now
        self._ticks = words[_TICKS] = self._ticks + 1

    def _remember(self, axis: int, fingerprint: int) -> None:
        words, head = self._words, self._head
        at = _RING + head % RING * 2
        words[at] = self._made << 16 | axis
        words[at + 1] = fingerprint
        self._head = words[_POSTED] = head + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressRecord:
    """A page, parsed. Times are nanoseconds of the monotonic clock, durations seconds.

    step: the newest made, -1 for none. made: how many in this generation. longest: gaps between ticks by phase, waits
    left out; longest_wait: of those. pause: what the script asked for, and why. odd: as in `RankStall`. caught: SIGUSR2
    may be sent. thread: the main thread's number. source: what the loader has been waiting for longest, "" if it is not
    waited for, or does not say.
    """

    ticks: int
    at: int
    beat: int
    phase: Phase
    step: int
    made: int
    chunk: int = -1
    unit: int = -1
    axes: tuple[AxisCount, ...] = ()
    wait: Wait | None = None
    longest: Mapping[Phase, float] = field(default_factory=dict)
    longest_wait: float = 0.0
    pause: float = 0.0
    why: str = ""
    odd: str = ""
    caught: bool = False
    thread: int = 0
    source: str = ""


def parse(page: bytes) -> ProgressRecord | None:
    """Return what a copy of a page says; None if nobody has written to it yet, or in another version's way.

    None, too, where it says what no writer does: the script's own code may have written over it.
    """
    words = struct.unpack(f"={SIZE // 8}Q", page)
    if words[_VERSION] != VERSION or not _sound(words):
        return None
    wait = None
    if words[_WAIT_AXIS]:
        axis = Axis(words[_WAIT_AXIS] - 1)
        wait = Wait(axis=axis.name.lower(), number=words[_WAIT_NUMBER], fingerprint=words[_WAIT_FINGERPRINT])
    gaps = [max(words[_GAPS + place], words[_GAPS + _PHASES + place]) / 1e9 for place in range(_PHASES)]
    phase = Phase(words[_PHASE])
    paused = phase is Phase.PAUSE
    note = page[8 * _NOTE : 8 * (_NOTE + _NOTE_WORDS)].rstrip(b"\0").decode(errors="replace")
    return ProgressRecord(
        ticks=words[_TICKS],
        at=words[_AT],
        beat=words[_BEAT],
        phase=phase,
        step=words[_STEP] - 1,
        made=words[_MADE],
        chunk=words[_CHUNK] - 1,
        unit=words[_UNIT] - 1,
        axes=tuple(_count(axis, words) for axis in Axis if words[_AXES + axis * _AXIS_WORDS]),
        wait=wait,
        longest={one: gaps[one] for one in Phase},
        longest_wait=gaps[_WAITS],
        pause=words[_PAUSE] / 1000 if paused else 0.0,
        why=note if paused else "",
        odd=_odd(words),
        caught=bool(words[_CAUGHT]),
        thread=words[_THREAD],
        source=longest_awaited(words[_AWAITED : _AWAITED + PLACES * WORDS]) if phase is Phase.DATA else "",
    )


def _sound(words: tuple[int, ...]) -> bool:
    """Return whether there are such a phase, such an axis, such times and such counts; each word by itself.

    A copy may have one word of before a store and another of after it.
    """
    counts = (at for place in range(_AXES, _AXES + _AXIS_WORDS * len(Axis), _AXIS_WORDS) for at in (place, place + 1))
    numbers = (_TICKS, _AT, _BEAT, _STEP, _MADE, _WAIT_NUMBER, _POSTED, _PAUSE, *counts)
    known = words[_PHASE] < len(Phase) and words[_WAIT_AXIS] <= len(Axis)
    return known and all(words[at] < _MOST for at in numbers)


def _count(axis: Axis, words: tuple[int, ...]) -> AxisCount:
    posted, done, last, _ = words[_AXES + axis * _AXIS_WORDS :][:_AXIS_WORDS]
    return AxisCount(axis=axis.name.lower(), posted=posted, done=done, fingerprint=last)


Operation = tuple[int, int]
"""An axis and a fingerprint; the first one of a program is `_BEGIN` and the kind of its step."""


def programs(page: bytes) -> tuple[tuple[Operation, ...], tuple[Operation, ...]]:
    """Return the operations of the present step and of the one before, each from its beginning on.

    A program is empty where its beginning is no longer in the ring, and the present one between two steps.
    """
    return _programs(struct.unpack(f"={SIZE // 8}Q", page))


def steps(page: bytes) -> list[tuple[int, dict[str, int]]]:
    """Return the numbers of the steps that a page has, oldest first; times are nanoseconds."""
    return steps_of(struct.unpack(f"={SIZE // 8}Q", page)[_SHEETS : _SHEETS + SHEETS * SHEET_WORDS])


def _programs(words: tuple[int, ...]) -> tuple[tuple[Operation, ...], tuple[Operation, ...]]:
    made, head = words[_MADE], words[_POSTED]
    steps: dict[int, list[Operation]] = {made: [], made - 1: []}
    for number in range(max(0, head - RING), head):
        at = _RING + number % RING * 2
        of, axis = words[at] >> 16, words[at] & _BEGIN
        if of in steps and (axis == _BEGIN or steps[of]):
            steps[of].append((axis, words[at + 1]))
    return tuple(steps[made]), tuple(steps[made - 1])


def _odd(words: tuple[int, ...]) -> str:
    """Return where the present step is no beginning of the one before, "" where it is, or if they are of two kinds."""
    now, before = _programs(words)
    if not now or not before or now[0] != before[0]:
        return ""
    for number, (axis, mark) in enumerate(now[1:], start=1):
        if number == len(before):
            return f"operation {number} of this step, {_name(axis, mark)}, is one more than the last step had"
        if (axis, mark) != before[number]:
            was = _name(*before[number])
            return f"operation {number} of this step is {_name(axis, mark)}; in the last step it was {was}"
    return ""


def _name(axis: int, mark: int) -> str:
    name = Axis(axis).name.lower() if axis in set(Axis) else str(axis)
    return f"{name} {mark:x}"


class ProgressPage:
    """One trainer's page and the memory for its stacks, as its keeper holds them."""

    def __init__(self) -> None:
        """Make both; OSError where there is no memory, or no descriptor."""
        self.page = os.memfd_create("elastic3d-progress", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.page, SIZE)
            self._memory = mmap.mmap(self.page, SIZE)
            self.stacks = os.memfd_create("elastic3d-stacks", os.MFD_CLOEXEC)
        except OSError:
            os.close(self.page)
            raise
        self._words = memoryview(self._memory).cast("Q")

    @property
    def descriptors(self) -> tuple[int, int]:
        """What the trainer inherits."""
        return self.page, self.stacks

    def ticked(self) -> tuple[int, int]:
        """Return the number of ticks so far and the time of the last, in nanoseconds; cheap."""
        return self._words[_TICKS], self._words[_AT]

    def gaps(self) -> list[int]:
        """Return the longest gaps of both windows, in nanoseconds; cheap."""
        return self._words[_GAPS : _GAPS + 2 * _PHASES].tolist()

    def forgive(self, seconds: float, before: Sequence[int]) -> None:
        """Take from the gaps that are longer than `before` the seconds in which nobody ran, where they hold them.

        The writer may note a longer one at the same time, which is lost then; it reads these words again with each
        phase and each step.
        """
        lost = round(seconds * 1e9)
        for place, (gap, was) in enumerate(zip(self.gaps(), before, strict=True), start=_GAPS):
            if gap > was and gap >= lost:
                self._words[place] = gap - lost

    def copy(self) -> bytes:
        """Return the page as it is now."""
        return self._memory[:]

    def close(self) -> None:
        """Give it up here."""
        self._words.release()
        self._memory.close()
        os.close(self.page)
        os.close(self.stacks)


def inherited(descriptor: int) -> ProgressWriter | None:
    """Return the writer to the page that a trainer inherited, and start its beat; None if it cannot be mapped."""
    try:
        memory = mmap.mmap(descriptor, SIZE)
    except (OSError, ValueError):
        return None
    writer = ProgressWriter(memoryview(memory))
    threads.start(_beat, writer, name="elastic3d-beat", edge=threads.Edge.ALONE)
    return writer


def _beat(writer: ProgressWriter) -> None:
    while True:
        writer.beat(caught=stacks.caught_here())
        SYSTEM.sleep(BEAT)

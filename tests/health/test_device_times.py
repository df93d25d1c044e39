"""How long a device computes, by its own marks: read once it has got there, without a wait for it."""

from __future__ import annotations

import mmap
import time
from collections.abc import Iterable
from dataclasses import dataclass

import pytest
import torch

from chaos.gpu.emulated_device import EmulatedDevice
from elastic3d.devices import ComputeDevice, device_at
from elastic3d.health import sheet
from elastic3d.health.phases import Axis, Phase
from elastic3d.health.record import SIZE, ProgressWriter
from elastic3d.health.sheet import StepSheet

STEPS = 3 * sheet.EVERY
PASS, BLOCKS, LATE, UPDATE = 0.006, 0.002, 0.003, 0.001
READ = 3000


@dataclass(frozen=True, slots=True)
class At:
    """A mark, and when a timeline gets to it."""

    seconds: float


class Timeline:
    """A device whose time is reckoned, beside its host's: work begins when what was queued before is done."""

    def __init__(self) -> None:
        self.host = self.device = 0.0
        self.waits = 0

    def compute(self, seconds: float) -> None:
        self.device = max(self.device, self.host) + seconds

    def wait(self) -> None:
        """Have the host wait for all of it."""
        self.host = max(self.host, self.device)

    def stopwatch(self) -> Timeline:
        return self

    def mark(self) -> At:
        self.compute(0.0)
        return At(self.device)

    def reached(self, mark: At) -> bool:
        return mark.seconds <= self.host

    def nanoseconds(self, first: At, second: At) -> int:
        return round((second.seconds - first.seconds) * 1e9)

    def forget(self, marks: Iterable[At]) -> None:
        pass


class Emulated(EmulatedDevice):
    """A device of its own thread, for which the host waits as for a vote's numbers."""

    def wait(self) -> None:
        self.begin_reading([torch.ones(1)]).wait()


def sheet_after(device: Timeline | Emulated, *, longer: float = 1.0, host: float = 0.0) -> StepSheet:
    """Make steps of one pass each way on a device; return the last row.

    longer: how many times as long the passes take. host: seconds by which the host is late with each of them.
    """
    writer = ProgressWriter(memoryview(mmap.mmap(-1, SIZE)))
    writer.measure_by(device.stopwatch(), pytest.fail)
    for step in range(1, STEPS + 1):
        writer.in_script(read=READ)
        writer.phase(Phase.FORWARD)
        writer.tick(chunk=0)
        if isinstance(device, Timeline):
            device.host += host
        device.compute((PASS - BLOCKS) * longer)
        writer.enter_blocks()
        device.compute(BLOCKS * longer)
        writer.leave_blocks(2)
        writer.phase(Phase.BACKWARD)
        # Queued work that waits for another rank, as an operation of NCCL does.
        number = writer.enter(Axis.FROM_NEXT, 1)
        device.compute(LATE)
        writer.leave(Axis.FROM_NEXT, number)
        device.compute(2 * PASS * longer)
        writer.phase(Phase.REDUCE)
        number = writer.enter(Axis.WORLD, 1)
        device.wait()
        writer.leave(Axis.WORLD, number)
        writer.phase(Phase.UPDATE)
        device.compute(UPDATE)
        waits = device.waits
        writer.step(step)
        assert device.waits == waits, "a step that was made is not waited for"
        writer.phase(Phase.USER)
    row = sheet.sheet_of(writer.row(1.0))
    assert row is not None
    return row


def test_passes_are_as_long_as_the_device_takes_for_them() -> None:
    """Their calls return at once; what the device waits for is no part of them, and all of a step is counted."""
    row = sheet_after(Timeline())
    assert row.forward == pytest.approx(PASS)
    assert row.backward == pytest.approx(2 * PASS)
    assert row.read == READ
    assert row.block == pytest.approx(BLOCKS / 2)
    assert row.wait_pp == pytest.approx(LATE)
    assert row.update == pytest.approx(UPDATE)
    assert row.total == pytest.approx(3 * PASS + LATE + UPDATE)


def test_a_slow_device_shows_in_its_passes_and_a_slow_host_in_those_it_is_late_with() -> None:
    """By as much as it is slow, and in nothing else; the host by what the device has to wait for it."""
    slow = sheet_after(Timeline(), longer=3.0)
    assert slow.forward == pytest.approx(3 * PASS)
    assert slow.block == pytest.approx(3 * BLOCKS / 2)
    assert (slow.wait_pp, slow.update) == pytest.approx((LATE, UPDATE))
    late = sheet_after(Timeline(), host=2 * PASS)
    # The device still has the update of the step before to do meanwhile.
    assert late.forward == pytest.approx(3 * PASS - UPDATE)
    assert late.backward == pytest.approx(2 * PASS)
    assert late.block == pytest.approx(BLOCKS / 2)


def test_a_device_that_computes_beside_its_host_takes_no_less_for_its_passes() -> None:
    """And nothing waits for it."""
    row = sheet_after(Emulated(0, late=0.0))
    assert row.forward >= PASS
    assert row.backward >= 2 * PASS
    assert row.block >= BLOCKS / 2
    assert row.wait_pp >= LATE
    assert row.update >= UPDATE


def test_a_step_that_the_device_has_not_ended_is_read_later() -> None:
    """The host may be a step ahead; a row that comes too late is none."""
    device = Timeline()
    writer = ProgressWriter(memoryview(mmap.mmap(-1, SIZE)))
    writer.measure_by(device.stopwatch(), pytest.fail)
    for step in range(1, STEPS + 1):
        writer.phase(Phase.FORWARD)
        device.compute(0.3 if step == STEPS - 1 else 0.001)
        if step < STEPS - 1:
            device.wait()
        writer.step(step)
        assert bool(writer.row(1.0)) == (2 * sheet.EVERY <= step < STEPS)
    device.wait()
    writer.step(STEPS + 1)
    assert writer.row(1.0), "still the row of these eight steps"


@pytest.mark.parametrize("refused", ["mark", "reached", "nanoseconds", "forget"])
def test_what_a_driver_refuses_ends_the_measuring_and_not_the_training(
    refused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is said once; the rank has no rows from then on, and nothing piles up."""
    device, said = Timeline(), list[Exception]()
    writer = ProgressWriter(memoryview(mmap.mmap(-1, SIZE)))
    writer.measure_by(device.stopwatch(), said.append)

    def refuse(*arguments: object) -> None:
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    for step in range(1, 2 * STEPS + 1):
        if step == STEPS + 2:
            monkeypatch.setattr(device, refused, refuse)
        writer.phase(Phase.FORWARD)
        device.compute(PASS)
        device.wait()
        writer.step(step)
        assert bool(writer.row(1.0)) == (2 * sheet.EVERY <= step < STEPS + sheet.EVERY)
    assert [str(error) for error in said] == ["CUDA error: operation not permitted when stream is capturing"]
    assert writer._device is not None
    assert not writer._device._made
    assert not writer._device._begun


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.device_count(), reason="needs a CUDA device")
def test_events_note_how_long_products_take() -> None:
    """On the stream that computes: as long as a wait for all of them, and none of it in the calls."""
    device: ComputeDevice = device_at("cuda", 0)
    device.open()
    stopwatch = device.stopwatch()
    assert stopwatch is not None
    matrix = torch.ones(4096, 4096, device=device.torch_device)
    for _ in range(3):
        matrix @ matrix
    torch.cuda.synchronize()
    begun = time.monotonic()
    first = stopwatch.mark()
    for _ in range(100):
        matrix @ matrix
    second = stopwatch.mark()
    # Another stream, as FSDP's hooks are in: the mark is on the training's all the same.
    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        third = stopwatch.mark()
    called = time.monotonic() - begun
    assert not stopwatch.reached(third), "a mark is behind the work before it"
    torch.cuda.synchronize()
    whole = time.monotonic() - begun
    assert stopwatch.reached(third)
    took = stopwatch.nanoseconds(first, second) / 1e9
    assert called < took <= whole
    assert took == pytest.approx(whole, rel=0.2)
    assert stopwatch.nanoseconds(second, third) < 1e6
    stopwatch.forget([first, second])
    again = stopwatch.mark()
    assert again in (first, second), "events are used again"

"""How long a device computes, by its own marks: read once it has got there, without a wait for it."""

from __future__ import annotations

import mmap
import time

import pytest
import torch

from chaos.emulated_device import EmulatedDevice
from elastic3d.devices import ComputeDevice, device_at
from elastic3d.health import sheet
from elastic3d.health.phases import Axis, Phase
from elastic3d.health.record import SIZE, ProgressWriter
from elastic3d.health.sheet import StepSheet

STEPS = 3 * sheet.EVERY
PASS, BLOCKS, LATE, UPDATE = 0.006, 0.002, 0.003, 0.001


def sheet_after(device: EmulatedDevice, *, longer: float = 1.0, host: float = 0.0) -> tuple[StepSheet, float]:
    """Make steps of one pass each way on a device; return the last row, and the seconds that calls of passes took.

    longer: how many times as long the passes take. host: seconds by which the host is late with each of them.
    """
    writer = ProgressWriter(memoryview(mmap.mmap(-1, SIZE)))
    writer.measure_by(device.stopwatch())
    called = 0.0
    for step in range(1, STEPS + 1):
        begun = time.monotonic()
        writer.phase(Phase.FORWARD)
        writer.tick(chunk=0)
        time.sleep(host)
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
        called += time.monotonic() - begun
        loss = device.begin_reading([torch.ones(1)])
        number = writer.enter(Axis.WORLD, 1)
        loss.wait()
        writer.leave(Axis.WORLD, number)
        writer.phase(Phase.UPDATE)
        device.compute(UPDATE)
        waits = device.waits
        writer.step(step)
        assert device.waits == waits, "a step that was made is not waited for"
        writer.phase(Phase.USER)
    row = sheet.sheet_of(writer.row(1.0))
    assert row is not None
    return row, called / STEPS


def test_passes_are_as_long_as_the_device_takes_for_them() -> None:
    """Their calls return at once; what the device waits for is no part of them, and all of a step is counted."""
    begun = time.monotonic()
    row, called = sheet_after(EmulatedDevice(0, late=0.0))
    each = (time.monotonic() - begun) / STEPS
    assert called < row.busy / 2
    assert row.forward >= PASS
    assert row.backward >= 2 * PASS
    assert row.block >= BLOCKS / 2
    assert row.wait_pp >= LATE
    assert row.update >= UPDATE
    assert row.total == pytest.approx(each, rel=0.3)


def test_a_slow_device_shows_in_its_passes_and_a_slow_host_in_those_it_is_late_with() -> None:
    """By as much as it is slow, and in nothing else; the host by what the device has to wait for it."""
    slow, called = sheet_after(EmulatedDevice(0, late=0.0), longer=3.0)
    assert slow.busy >= 9 * PASS
    assert slow.block >= 3 * BLOCKS / 2
    assert called + slow.update + slow.wait_pp < slow.busy
    late, _ = sheet_after(EmulatedDevice(0, late=0.0), host=2 * PASS)
    assert late.forward >= 3 * PASS
    assert late.block < late.forward / 2


def test_a_step_that_the_device_has_not_ended_is_read_later() -> None:
    """The host may be a step ahead; a row that comes too late is none."""
    device = EmulatedDevice(0, late=0.0)
    writer = ProgressWriter(memoryview(mmap.mmap(-1, SIZE)))
    writer.measure_by(device.stopwatch())
    for step in range(1, STEPS + 1):
        writer.phase(Phase.FORWARD)
        device.compute(0.3 if step == STEPS - 1 else 0.001)
        if step < STEPS - 1:
            device.begin_reading([torch.ones(1)]).wait()
        begun = time.monotonic()
        writer.step(step)
        assert time.monotonic() - begun < 0.2
        assert bool(writer.row(1.0)) == (2 * sheet.EVERY <= step < STEPS)
    device.begin_reading([torch.ones(1)]).wait()
    writer.step(STEPS + 1)
    assert writer.row(1.0), "still the row of these eight steps"


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

"""A trainer waits for the memory of the one before it, for a while."""

from __future__ import annotations

from elastic3d.devices.cpu import CpuDevice
from elastic3d.devices.turn import LIMIT, await_memory
from tests.clocks import HandClock
from tests.logs import recorded

WHOLE = 1000


class Freeing(CpuDevice):
    """A device whose free memory is what is given, look by look; the last for ever."""

    def __init__(self, *free: int) -> None:
        self._free = list(free)
        self.looks = 0

    def free(self) -> int:
        self.looks += 1
        return self._free.pop(0) if len(self._free) > 1 else self._free[0]


class Moving(HandClock):
    """Time that passes by sleeping alone."""

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_memory_that_is_free_is_not_waited_for() -> None:
    """Nor is some that is missing, for contexts differ; and what nobody measured is not expected."""
    clock = Moving()
    for device, expected in ((Freeing(1000), WHOLE), (Freeing(981), WHOLE), (Freeing(5), 0)):
        await_memory(device, expected, clock=clock)
        assert device.looks == 1
    assert clock.now == HandClock().now


def test_memory_that_comes_back_is_waited_for() -> None:
    device = Freeing(100, 100, 600, 1000)
    await_memory(device, WHOLE, clock=Moving())
    assert device.looks == 4


def test_memory_that_stays_away_is_reported_and_not_waited_for_any_longer() -> None:
    """Somebody else holds it; what does not fit then says so by itself."""
    clock = Moving()
    with recorded() as entries:
        await_memory(Freeing(400), WHOLE, clock=clock)
    assert LIMIT < clock.now - HandClock().now < LIMIT + 1
    (entry,) = entries
    assert (entry["event"], entry["free"], entry["expected"]) == ("device.occupied", 400, WHOLE)

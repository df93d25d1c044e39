"""The clocks of one simulated host."""

from __future__ import annotations

from chaos.simulation.loop import Loop


class HostClock:
    """A clock of `elastic3d.clock.Clock`: its monotonic time begins anywhere, its wall clock is wrong by `skew`.

    Two hosts never agree on either, so that comparing times across hosts is seen at once.
    """

    def __init__(self, loop: Loop, *, origin: float, skew: float) -> None:
        self._loop = loop
        self.origin = origin
        self.skew = skew

    def monotonic(self) -> float:
        """Return this host's seconds since it was started."""
        return self._loop.now + self.origin

    def wall(self) -> float:
        """Return this host's wall clock time."""
        return 1_600_000_000.0 + self._loop.now + self.skew

    def sleep(self, seconds: float) -> None:
        """Nobody sleeps in virtual time."""
        raise AssertionError("a simulated member must not sleep")

    def virtual(self, monotonic: float) -> float:
        """Return when, in virtual time, this host's monotonic clock shows `monotonic`."""
        return monotonic - self.origin

"""The store in which the agents of one generation meet: its waits end when the generation does.

torchrun's agents wait for each other in three places, each time for minutes and deaf to everything else: for rank 0's
address, when they number their workers, and at the end until all have finished. A node that dies meanwhile would take
the others along by a timeout; an agent that is slow to stop its workers would too. Here such a wait lasts as long as
the generation: what it returns after that only has to bring the agent to the point where it asks for the next one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar

from elastic3d.rendezvous.table import GenerationOver, Seat

T = TypeVar("T")

_FINISHING = "torchelastic/agent/terminal_state"
_NUMBERS = "torchelastic/assigned_ranks/"


class GenerationStore:
    """Has the methods of torch's Store that torchrun's agent calls, for agent `rank` of `world`.

    finished: called when the agent says that its workers have all ended well.
    Until `admit`, a wait that outlives the generation raises GenerationOver; after it, torchrun is in charge, which
    takes an exception for the end of the job, and gets a stand-in.
    """

    def __init__(self, seat: Seat, rank: int, world: int, finished: Callable[[], None]) -> None:
        self._seat, self._rank, self._world, self._finished = seat, rank, world, finished
        self._admitted = False
        self._said = b""

    def admit(self) -> None:
        """Hand over to torchrun."""
        self._admitted = True

    @property
    def timeout(self) -> timedelta:
        """What `set_timeout` may be given back; waits here have none."""
        return timedelta.max

    def set_timeout(self, timeout: timedelta) -> None:
        """Take note of nothing: a wait lasts as long as the generation."""

    def set(self, key: str, value: str | bytes) -> None:
        """Write one key."""
        self._said = said = value.encode() if isinstance(value, str) else bytes(value)
        self._try(lambda: self._seat.set(key, said))

    def multi_set(self, keys: list[str], values: list[str]) -> None:
        """Write several keys."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def add(self, key: str, amount: int) -> int:
        """Add to a counter and return it."""
        if key.startswith(_FINISHING):
            self._finished()
        count = self._try(lambda: self._seat.add(key, amount))
        return 0 if count is None else count

    def get(self, key: str) -> bytes:
        """Return the value of a key, once it is there."""
        return self.multi_get([key])[0]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Return the values of several keys, once all are there.

        The stand-in gives every other node as many workers as this one has, so that they can be numbered.
        """
        values = self._try(lambda: self._seat.get(keys))
        if values is not None:
            return values
        ranks = json.dumps([self._rank, self._world, self._rank, self._world]).encode()
        return [ranks if key.startswith(_NUMBERS) else self._said for key in keys]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Return once all keys are there, or the generation is over."""
        self._try(lambda: self._seat.get(list(keys)))

    def _try(self, do: Callable[[], T]) -> T | None:
        """Return what `do` does; None when the generation was over before it was done."""
        try:
            return do()
        except GenerationOver:
            if not self._admitted:
                raise
            return None

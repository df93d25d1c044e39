"""The store in which the agents of one generation meet: its waits end when the generation does.

torchrun's agents wait for each other in three places, each time for minutes and without reacting to anything else: for
rank 0's address, when they number their workers, and at the end until all have finished. A node that dies meanwhile
would end the others too, by a timeout; so would an agent that is slow to stop its workers. Here such a wait lasts as
long as the generation: its result after that only has to bring the agent to the point where it asks for the next one.

Under all other keys it is a store like torch's others: it can be given to `PrefixStore` and to `init_process_group`,
has the same timeouts and raises the same errors.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from elastic3d.clock import SYSTEM, Clock
from elastic3d.errors import UsageError
from elastic3d.rendezvous.seat import GenerationOver, Seat, WaitedTooLong

T = TypeVar("T")

LONGEST = 8 * 2**20
"""Bytes of the longest key or value, as in torch's TCPStore."""

_AGENTS = "torchelastic/"
_FINISHING = f"{_AGENTS}agent/terminal_state"
_NUMBERS = f"{_AGENTS}assigned_ranks/"


class GenerationStore(Store):
    """A torch store for agent `rank` of `world`. Both torch's Python code and its C++ code call it.

    finished: called when the agent says that its workers have all succeeded.
    Until `admit`, a call that outlives the generation raises GenerationOver; after it, torchrun is in charge, which
    takes an exception for the end of the job, so that it gets a stand-in value for its own keys. For others
    DistStoreError is raised after `timeout`, DistNetworkError when the generation is over.
    """

    def __init__(
        self, seat: Seat, rank: int, world: int, finished: Callable[[], None], *, clock: Clock = SYSTEM
    ) -> None:
        super().__init__()
        self._seat, self._rank, self._world, self._finished = seat, rank, world, finished
        self._clock = clock
        self._admitted = False
        self._said = b""

    def admit(self) -> None:
        """Take note that torchrun is in charge from now on."""
        self._admitted = True

    def set(self, key: str, value: str | bytes) -> None:
        """Write one key."""
        self._said = said = _checked(key, value)
        self._try([key], lambda until: self._seat.set(key, said, until))

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Write several keys, one after the other."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def get(self, key: str) -> bytes:
        """Return the value of a key, once it is there."""
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of several keys, once all are there.

        The stand-in gives every other node as many workers as this one has, so that they can be numbered.
        """
        values = self._try(keys, lambda until: self._seat.get(list(keys), until))
        if values is not None:
            return values
        ranks = json.dumps([self._rank, self._world, self._rank, self._world]).encode()
        return [ranks if key.startswith(_NUMBERS) else self._said for key in keys]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Return once all keys are there. timeout: this store's by default."""
        self._try(keys, lambda until: self._seat.get(list(keys), until), timeout)

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys are there."""
        return bool(self._try(keys, lambda until: self._seat.check(list(keys), until)))

    def add(self, key: str, amount: int) -> int:
        """Add to a counter and return it."""
        if key.startswith(_FINISHING):
            self._finished()
        count = self._try([key], lambda until: self._seat.add(key, amount, until))
        return 0 if count is None else count

    def append(self, key: str, value: str | bytes) -> None:
        """Append to the value that is there."""
        said = _checked(key, value)
        self._try([key], lambda until: self._seat.append(key, said, until))

    def compare_set(self, key: str, expected: str | bytes, value: str | bytes) -> bytes:
        """Replace a value if it is `expected`; return what is there then.

        "" means no value; if there is none and something was expected, `expected` is returned.
        """
        before, after = _checked(key, expected), _checked(key, value)
        current = self._try([key], lambda until: self._seat.swap(key, before, after, until))
        return before if current is None else current

    def delete_key(self, key: str) -> bool:
        """Delete a key; return whether it was there."""
        return bool(self._try([key], lambda until: self._seat.delete(key, until)))

    def num_keys(self) -> int:
        """Return how many keys the generation has, those of torchrun's agents among them."""
        return self._try([""], self._seat.count) or 0

    def has_extended_api(self) -> bool:
        """Return True: there are append, multi_get and multi_set."""
        return True

    # The names by which torch's C++ code calls these two.
    deleteKey = delete_key  # noqa: N815
    getNumKeys = num_keys  # noqa: N815

    def _try(self, keys: Sequence[str], do: Callable[[float | None], T], timeout: timedelta | None = None) -> T | None:
        """Return the result of `do`, given its time limit; None for an agent's keys if the generation ended before."""
        agents = all(key.startswith(_AGENTS) for key in keys)
        patience: timedelta = self.timeout if timeout is None else timeout  # type: ignore[attr-defined]  # torch's stub
        limited = self._admitted and not agents
        until = self._clock.monotonic() + patience.total_seconds() if limited else None
        try:
            return do(until)
        except GenerationOver:
            if not self._admitted:
                raise
            if agents:
                return None
            raise dist.DistNetworkError(
                "this store's generation is over; the next rendezvous brings another store"
            ) from None
        except WaitedTooLong:
            milliseconds = round(patience.total_seconds() * 1000)
            raise dist.DistStoreError(f"wait timeout after {milliseconds}ms, keys: {', '.join(keys)}") from None


def _checked(key: str, value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else bytes(value)
    if max(len(key), len(data)) > LONGEST:
        raise UsageError(f"store: {key[:80]!r} has {len(data)} bytes; keys and values have at most {LONGEST}")
    return data

"""The store in which the agents of one generation meet: its waits end when the generation does.

torchrun's agents wait for each other in three places, each time for minutes and deaf to everything else: for rank 0's
address, when they number their workers, and at the end until all have finished. A node that dies meanwhile would take
the others along by a timeout; an agent that is slow to stop its workers would too. Here such a wait lasts as long as
the generation: what it returns after that only has to bring the agent to the point where it asks for the next one.
"""

from __future__ import annotations

import atexit
import json
import queue
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar

from torch._C._distributed_c10d import PrefixStore
from torch.distributed import DistError

from elastic3d.clock import SYSTEM, Clock

T = TypeVar("T")

POLL = 0.1
"""Most seconds between two looks at the store; torch's own `wait` would be deaf, and complains on stderr in the end."""

EXIT_PATIENCE = 8.0
"""Seconds to wait at exit for a call left to itself: one that comes back while the interpreter ends aborts it."""

_FINISHING = "torchelastic/agent/terminal_state"
_NUMBERS = "torchelastic/assigned_ranks/"


class GenerationOver(Exception):
    """The generation ended while its agents were still meeting: wait for the next one."""


def attend(do: Callable[[], T], over: Callable[[], bool]) -> T:
    """Return what `do` returns, GenerationOver once `over`, even if `do` itself never comes back.

    Some of TCPStore's calls have no timeout: with a server that is stopped they take for ever. Such a call is left to
    itself, on a thread of its own.
    """
    answers: queue.SimpleQueue[tuple[T] | RuntimeError] = queue.SimpleQueue()

    def run() -> None:
        try:
            answers.put((do(),))
        except RuntimeError as error:
            answers.put(error)

    thread = threading.Thread(target=run, name="elastic3d-store", daemon=True)
    thread.start()
    while True:
        try:
            answer = answers.get(timeout=POLL)
        except queue.Empty:
            if over():
                atexit.register(thread.join, EXIT_PATIENCE)
                raise GenerationOver from None
            continue
        if isinstance(answer, RuntimeError):
            raise answer
        return answer[0]


class GenerationStore:
    """Has the methods of torch's Store that torchrun's agent calls, for agent `rank` of `world`.

    over: whether the generation has ended. finished: called when the agent says that its workers have all ended well.
    Until `admit`, a wait that outlives the generation raises GenerationOver; after it, torchrun is in charge, which
    takes an exception for the end of the job, and gets a stand-in.
    """

    def __init__(
        self,
        store: PrefixStore,
        rank: int,
        world: int,
        over: Callable[[], bool],
        finished: Callable[[], None],
        clock: Clock = SYSTEM,
    ) -> None:
        self._store, self._rank, self._world = store, rank, world
        self._over, self._finished, self._clock = over, finished, clock
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
        self._said = value.encode() if isinstance(value, str) else bytes(value)
        self._try(lambda: self._store.set(key, value))  # type: ignore[arg-type]  # torch's stub knows no bytes

    def multi_set(self, keys: list[str], values: list[str]) -> None:
        """Write several keys."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def add(self, key: str, amount: int) -> int:
        """Add to a counter and return it."""
        if key.startswith(_FINISHING):
            self._finished()
        count = self._try(lambda: self._store.add(key, amount))
        return 0 if count is None else count

    def get(self, key: str) -> bytes:
        """Return the value of a key, once it is there."""
        return self.multi_get([key])[0]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Return the values of several keys, once all are there.

        The stand-in gives every other node as many workers as this one has, so that they can be numbered.
        """
        values = self._try(lambda: self._store.multi_get(keys)) if self._wait(keys) else None
        if values is not None:
            return values
        ranks = json.dumps([self._rank, self._world, self._rank, self._world]).encode()
        return [ranks if key.startswith(_NUMBERS) else self._said for key in keys]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Return once all keys are there, or the generation is over."""
        self._wait(list(keys))

    def _wait(self, keys: list[str]) -> bool:
        """Return whether the keys are there; False once the generation is over."""
        pause = POLL / 32
        while not self._ended():
            if self._try(lambda: self._store.check(keys)):
                return True
            self._clock.sleep(pause)
            pause = min(POLL, 2 * pause)
        return False

    def _try(self, do: Callable[[], T]) -> T | None:
        """Return what `do` does; None when its server died and the generation is over."""
        while not self._ended():
            try:
                return attend(do, self._over)
            except GenerationOver:
                continue
            except DistError:
                # Its server is dead or slow: it is a matter of time until the generation is over, or it answers.
                self._clock.sleep(POLL)
        return None

    def _ended(self) -> bool:
        if not self._over():
            return False
        if not self._admitted:
            raise GenerationOver
        return True

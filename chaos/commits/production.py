"""The surroundings of the production code in a simulation: no threads but the actor's own, and seeded randomness.

Its thread pools become ones that run each task at once, in the calling thread: an actor's operations come in one
order, and which one is the schedule's business. Nothing of the protocol is replaced.
"""

from __future__ import annotations

import secrets
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from random import Random
from typing import Any, TypeVar

T = TypeVar("T")


class AtOnce(Executor):
    """A pool without threads: a submitted task is done when `submit` returns."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Do it, and return its result as a future that is done."""
        future: Future[T] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except BaseException as error:  # noqa: BLE001 (as a pool does: it is raised by `result`)
            future.set_exception(error)
        return future


class Never:
    """A thread that never runs: it would renew an announcement, which then expires."""

    def __init__(self, **_: object) -> None:
        pass

    def start(self) -> None:
        """Do nothing."""

    def join(self, timeout: float | None = None) -> None:
        """Do nothing."""


class Drawn:
    """`secrets`, drawn from a seed."""

    def __init__(self, seed: int) -> None:
        self._random = Random(f"secrets {seed}")

    def token_hex(self, nbytes: int = 32) -> str:
        """Return hex digits for so many bytes."""
        return self._random.randbytes(nbytes).hex()

    def token_bytes(self, nbytes: int = 32) -> bytes:
        """Return so many bytes."""
        return self._random.randbytes(nbytes)


@contextmanager
def alone(seed: int) -> Iterator[None]:
    """Let the checkpointing modules that are imported run without threads, their randomness drawn from `seed`."""
    drawn = Drawn(seed)
    replaced: list[tuple[object, str, object]] = []
    for module in [module for name, module in sys.modules.items() if name.startswith("checkpointing.")]:
        given = vars(module)
        if "ThreadPoolExecutor" in given:
            replaced.append((module, "ThreadPoolExecutor", given["ThreadPoolExecutor"]))
            module.ThreadPoolExecutor = AtOnce  # type: ignore[attr-defined]
        if given.get("Thread") is threading.Thread:
            replaced.append((module, "Thread", threading.Thread))
            module.Thread = Never  # type: ignore[attr-defined]
        if given.get("secrets") is secrets:
            replaced.append((module, "secrets", secrets))
            module.secrets = drawn  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for module_, name, was in replaced:
            setattr(module_, name, was)

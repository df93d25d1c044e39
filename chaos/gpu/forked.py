"""Children forked from a stage that has imported torch and touched no device: trainers are forked like that too."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from elastic3d.clock import SYSTEM
from elastic3d.worker.processes.process import die_with_parent


class ChildFailed(Exception):
    """A child raised, died or did not answer in time."""


class Child:
    """One child. Its function gets a pipe and may talk over it; what it returns is the last message."""

    def __init__(self, function: Callable[..., Any], *given: Any) -> None:
        context = multiprocessing.get_context("fork")
        self.pipe, theirs = context.Pipe()
        self.forked_at = SYSTEM.monotonic()
        self._process = context.Process(target=_run, args=(function, given, theirs, self.pipe, os.getpid()))
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        """Its pid, which leads a process group of its own."""
        assert self._process.pid is not None
        return self._process.pid

    def answer(self, limit: float) -> Any:
        """Return its next message; ChildFailed for what it raised, at its death, and after `limit` seconds."""
        try:
            if not self.pipe.poll(max(0.0, limit)):
                raise ChildFailed(f"no answer within {limit:.0f} s")
            kind, value = self.pipe.recv()
        except (EOFError, OSError):
            self._process.join(timeout=5)
            raise ChildFailed(f"died with exit code {self._process.exitcode}") from None
        if kind == "raised":
            raise ChildFailed(value)
        return value

    def reap(self) -> None:
        """Wait for the end of one that was killed."""
        self._process.join()

    def end(self) -> None:
        """Kill it and whatever it has forked, and reap it."""
        # Reaped, its number may be another's group.
        if self._process.exitcode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self._process.join()
        self.pipe.close()


class Talk:
    """A child's end of its pipe."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def say(self, value: Any) -> None:
        """Send a message."""
        self._pipe.send(("said", value))

    def hear(self) -> Any:
        """Block for one."""
        return self._pipe.recv()


def in_child(function: Callable[..., Any], *given: Any, limit: float) -> Any:
    """Return what a function returns in a child of its own, which is gone then."""
    child = Child(function, *given)
    try:
        return child.answer(limit)
    finally:
        child.end()


def _run(
    function: Callable[..., Any], given: tuple[Any, ...], pipe: Connection, other: Connection, parent: int
) -> None:
    # What the parent left in a cycle, such as the store of a world that failed, would be collected here as well: its
    # end waits for a thread of the parent's, which a child has not got.
    gc.freeze()
    os.setpgid(0, 0)
    die_with_parent(parent)
    other.close()
    try:
        pipe.send(("said", function(Talk(pipe), *given)))
    except BaseException as error:  # noqa: BLE001 - the edge of a process: whatever it was is told
        traceback.print_exc()
        with contextlib.suppress(OSError):
            pipe.send(("raised", f"{type(error).__name__}: {error}"))
    sys.stderr.flush()
    os._exit(0)

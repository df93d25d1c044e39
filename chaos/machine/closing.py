"""Servers, disks and networks are closed whole: a signal that comes meanwhile acts once they are.

What closes them is Python code like any other, in which a handler may raise. An `ExitStack` goes on with the next one
then, and what was half closed stays: a mounted disk, a process, a folder.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType, TracebackType


@contextmanager
def put_off() -> Iterator[None]:
    """Put off the first SIGINT, SIGTERM or SIGHUP until the end of the block: its handler is called then.

    Later ones are dropped, as in every cleanup. A signal that no Python code handles acts at once. Only the main thread
    can have it so; in others the block runs as it is.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: handler for number in numbers if callable(handler := signal.getsignal(number))}
    came: list[tuple[int, FrameType | None]] = []
    for number in before:
        signal.signal(number, lambda number, frame: came.append((number, frame)))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if came:
            first, frame = came[0]
            before[signal.Signals(first)](first, frame)


class ClosingStack(ExitStack):
    """An `ExitStack` that no first signal interrupts while it closes what it holds."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> bool | None:
        with put_off():
            return super().__exit__(kind, error, trace)

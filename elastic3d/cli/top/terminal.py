"""A terminal while a page has it: one that is given back as it was, however the page ends.

Keys come one by one and are not echoed; signals that end the process, and a change of the size, only wake the page, so
that it ends in order: no exception comes from a signal.
"""

from __future__ import annotations

import os
import select
import signal
import termios
import tty
from types import FrameType, TracebackType
from typing import TextIO

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
MOST = 4096


class PageTerminal:
    """A context, for the main thread. keys: where they come from; a file that is no terminal has none.

    ended: the signal that asks the page to end, None as long as there is none.
    """

    def __init__(self, keys: TextIO) -> None:
        self._keys: int | None = None
        self.ended: signal.Signals | None = None
        try:
            if keys.isatty():
                self._keys = keys.fileno()
        except (OSError, ValueError):
            pass  # it is closed

    def __enter__(self) -> PageTerminal:
        self._woken, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        os.set_blocking(self._woken, False)
        self._before = termios.tcgetattr(self._keys) if self._keys is not None else None
        self._handlers = {number: signal.signal(number, self._signalled) for number in ENDING}
        self._handlers[signal.SIGWINCH] = signal.signal(signal.SIGWINCH, lambda number, frame: self.wake())
        # A page that is stopped would leave the shell its own screen.
        self._handlers[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, signal.SIG_IGN)
        if self._keys is not None:
            tty.setcbreak(self._keys, termios.TCSADRAIN)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._keys is not None and self._before is not None:
            try:
                termios.tcsetattr(self._keys, termios.TCSAFLUSH, self._before)
            except termios.error:
                pass  # it has gone away
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        woken, wake = self._woken, self._wake
        self._woken = self._wake = -1
        os.close(woken)
        os.close(wake)

    def wake(self) -> None:
        """Have `wait` return. From any thread, and from signal handlers."""
        try:
            os.write(self._wake, b"!")
        except OSError:
            pass  # it was woken often enough, or is over

    def wait(self, seconds: float) -> bytes:
        """Wait for keys, or to be woken, at most so long; return what the keys sent."""
        watched = [self._woken, *([self._keys] if self._keys is not None else [])]
        ready = select.select(watched, [], [], seconds)[0]
        if self._woken in ready:
            os.read(self._woken, MOST)
        if self._keys is None or self._keys not in ready:
            return b""
        try:
            sent = os.read(self._keys, MOST)
        except OSError:
            sent = b""
        if not sent:
            # The terminal has gone away: nobody can press q any more.
            self._keys, self.ended = None, signal.SIGHUP
        return sent

    def _signalled(self, number: int, frame: FrameType | None) -> None:
        self.ended = signal.Signals(number)
        self.wake()

"""A terminal is given back as it was: by a key, by signals, and by an exception. Each in a process of its own."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from tests.paths import ROOT

PAGE = """
import sys
from rich.console import Console
from elastic3d.cli.top import showing
from tests.cli.status import scenes
from tests.cli.top.pages import document_of

shown = showing.Shown()
shown.publish(document_of(scenes.many()))
if sys.argv[1:] == ["broken"]:
    def picture(*given, **more):
        raise LookupError("no picture")
    showing.picture = picture
ended = showing.show(Console(highlight=False), shown)
print("ended by", ended.name if ended else "a key")
"""

SCREEN, SCREEN_BACK = b"\x1b[?1049h", b"\x1b[?1049l"
CURSOR, CURSOR_BACK = b"\x1b[?25l", b"\x1b[?25h"


@dataclass(slots=True)
class Terminal:
    """A page in a terminal of this test's own, and what it has shown so far."""

    process: subprocess.Popen[bytes]
    mine: int
    theirs: int
    before: list[object]
    seen: bytes = b""

    def until(self, words: bytes) -> bytes:
        """Read until the words appear; return what was read."""
        deadline, new = time.monotonic() + 60, b""
        while words not in new:
            assert time.monotonic() < deadline, (self.seen + new).decode(errors="replace")[-2000:]
            if select.select([self.mine], [], [], 0.1)[0]:
                new += os.read(self.mine, 65536)
        self.seen += new
        return new

    def press(self, keys: bytes) -> None:
        os.write(self.mine, keys)

    def resize(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self.mine, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self.process.send_signal(signal.SIGWINCH)

    def given_back(self) -> None:
        """Assert that the screen, the cursor and the terminal's settings are as before."""
        assert self.process.wait(timeout=30) is not None
        while select.select([self.mine], [], [], 0.1)[0]:
            self.seen += os.read(self.mine, 65536)
        assert self.seen.rfind(SCREEN_BACK) > self.seen.rfind(SCREEN) >= 0
        assert self.seen.rfind(CURSOR_BACK) > self.seen.rfind(CURSOR) >= 0
        assert termios.tcgetattr(self.theirs) == self.before


@contextmanager
def page(*arguments: str) -> Iterator[Terminal]:
    mine, theirs = pty.openpty()
    fcntl.ioctl(mine, termios.TIOCSWINSZ, struct.pack("HHHH", 20, 90, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    process = subprocess.Popen(
        [sys.executable, "-c", PAGE, *arguments],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment | {"PYTHONPATH": str(ROOT), "TERM": "xterm"},
        start_new_session=True,
    )
    terminal = Terminal(process, mine, theirs, termios.tcgetattr(theirs))
    try:
        yield terminal
    finally:
        process.kill()
        process.wait()
        os.close(mine)
        os.close(theirs)


def test_keys_turn_pages_choose_the_order_and_end_it() -> None:
    """And the page follows the size of its terminal."""
    with page() as terminal:
        first = terminal.until(b"page 1 of 7")
        assert SCREEN in first
        assert b"gpu-00" in first
        terminal.press(b"\x1b[C")
        assert b"gpu-09" in terminal.until(b"page 2 of 7")
        terminal.press(b"sr")
        terminal.until(b"sort: node")
        terminal.resize(120, 40)
        assert b"last cause" in terminal.until(b"page 1 of 3")
        terminal.press(b"q")
        terminal.until(b"ended by a key")
        terminal.given_back()
        assert terminal.process.returncode == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_give_the_terminal_back(number: signal.Signals) -> None:
    """Those that end a process end the page first."""
    with page() as terminal:
        terminal.until(b"sort: ranks")
        terminal.process.send_signal(number)
        terminal.until(f"ended by {number.name}".encode())
        terminal.given_back()


def test_an_exception_gives_the_terminal_back() -> None:
    """Its traceback is then on the screen that was there before."""
    with page("broken") as terminal:
        terminal.until(b"LookupError: no picture")
        terminal.given_back()
        assert terminal.seen.rfind(b"LookupError") > terminal.seen.rfind(SCREEN_BACK)

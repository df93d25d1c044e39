"""A person who watches a run may end it at any time, also by closing the terminal: what it holds is given back."""

from __future__ import annotations

import os
import pty
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from chaos.report.watching import clean_end


@pytest.fixture(autouse=True)
def _heard() -> Iterator[None]:
    """Have SIGHUP end a process, also where the tests themselves run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def test_a_terminal_that_is_closed_lets_the_cleanup_happen(tmp_path: Path) -> None:
    """To its end, though nothing can be written to the terminal any more."""
    pid, terminal = pty.fork()
    if pid == 0:
        _be_watched(tmp_path / "clean")
    assert os.read(terminal, 100).startswith(b"ready")
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 128 + signal.SIGHUP
    assert (tmp_path / "clean").exists()


def _be_watched(clean: Path) -> NoReturn:
    """Wait in a child process, which leads the session of a terminal, for its end; then clean up and say so."""
    code = 1
    try:
        with clean_end():
            try:
                os.write(1, b"ready\n")
                signal.pause()
            finally:
                os.write(1, b"cleaning up\n")
                clean.touch()
    except SystemExit as end:
        code = int(end.code or 0)
    finally:
        os._exit(code)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_second_signal_does_not_interrupt_the_cleanup(number: signal.Signals) -> None:
    """And afterwards signals do what they did before."""
    before = signal.getsignal(number)
    cleaned = []

    def watched() -> None:
        with clean_end():
            try:
                signal.raise_signal(number)
            finally:
                signal.raise_signal(number)
                cleaned.append(number)

    with pytest.raises(SystemExit) as end:
        watched()
    assert (cleaned, end.value.code) == ([number], 128 + number)
    assert signal.getsignal(number) is before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_no_signal_interrupts_what_is_settled(number: signal.Signals) -> None:
    """Such as a report that is being written."""
    before = signal.getsignal(number)
    with clean_end() as settle:
        settle()
        signal.raise_signal(number)
        signal.raise_signal(number)
    assert signal.getsignal(number) is before


def test_a_hang_up_is_ignored_where_nohup_says_so() -> None:
    """The run goes on without a terminal."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with clean_end():
            signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)

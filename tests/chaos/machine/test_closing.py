"""What is being closed is closed whole, whenever a person presses Ctrl-C; what they asked for comes right after."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pytest

from chaos.machine.closing import ClosingStack, put_off
from chaos.report.watching import clean_end

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture(autouse=True)
def heeded() -> Iterator[None]:
    """Heed all of them, though what nohup or a shell's `&` starts begins with some ignored."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    for number in SIGNALS:
        signal.signal(number, signal.default_int_handler if number is signal.SIGINT else signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_that_comes_while_things_are_closed_acts_once_all_are(number: signal.Signals) -> None:
    """A thing that is closed in two moves is never left between them."""
    closed: list[str] = []

    def close(name: str) -> None:
        closed.append(f"{name} is closing")
        signal.raise_signal(number)
        closed.append(f"{name} is closed")

    def played() -> None:
        with ClosingStack() as stack:
            stack.callback(close, "etcd")
            stack.callback(close, "the disk")
        closed.append("nobody asked to end")

    with pytest.raises(SystemExit) as end, clean_end():
        played()
    assert end.value.code == 128 + number
    assert closed == ["the disk is closing", "the disk is closed", "etcd is closing", "etcd is closed"]


def test_a_stack_keeps_the_error_that_ended_its_block() -> None:
    """A signal that comes meanwhile ends what is around it, with that error as its context."""

    def broken(*numbers: signal.Signals) -> None:
        with ClosingStack() as stack:
            for number in numbers:
                stack.callback(signal.raise_signal, number)
            raise ValueError("it broke")

    with pytest.raises(KeyboardInterrupt) as interrupted:
        broken(signal.SIGINT)
    assert isinstance(interrupted.value.__context__, ValueError)
    with pytest.raises(ValueError, match="it broke"):
        broken()


def test_handlers_are_those_from_before() -> None:
    """After the block, and where none was Python's; a second signal while it lasts changes nothing."""
    heard: list[int] = []
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with put_off():
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGHUP)
            assert heard == []
        assert heard == [signal.SIGTERM]
        signal.raise_signal(signal.SIGTERM)
        assert heard == [signal.SIGTERM] * 2
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_other_threads_close_as_ever() -> None:
    """Only the main thread has handlers."""
    closed: list[str] = []

    def played() -> None:
        with ClosingStack() as stack:
            stack.callback(closed.append, "closed")

    thread = threading.Thread(target=played)
    thread.start()
    thread.join()
    assert closed == ["closed"]

"""Ends a command that takes long at a signal, with words."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

import typer

from elastic3d.cli.ckpt.place import complain


@contextmanager
def ended_by_signals(said: Callable[[], str]) -> Iterator[None]:
    """End with code 130 at Ctrl-C or SIGTERM, when the block has put its things in order; say what `said` returns."""

    def interrupt(number: int, frame: object) -> NoReturn:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    except KeyboardInterrupt:
        complain(said())
        raise typer.Exit(130) from None
    finally:
        signal.signal(signal.SIGTERM, before)

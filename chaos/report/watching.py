"""Jobs that are played while a person watches, who may end them at any time."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.live import Live

from chaos.faults.fault import Fault
from chaos.history.follow import Picture
from chaos.playing.outcome import Outcome
from chaos.playing.play import play
from chaos.playing.setting import Etcd, Setting
from chaos.report.view import loss_text, progress


def play_watched(
    setting: Setting, faults: Sequence[Fault], etcd: Etcd, workdir: Path, title: str, console: Console, *, name: str
) -> Outcome:
    """Play a history while a console shows it: as it is now on a terminal, line by line elsewhere."""
    if not console.is_terminal:
        console.print(title)
        return play(setting, faults, etcd=etcd, workdir=workdir, name=name, watch=_Lines(console, setting))
    with Live(progress(Picture(), setting, title), console=console, refresh_per_second=8) as live:
        return play(
            setting,
            faults,
            etcd=etcd,
            workdir=workdir,
            name=name,
            watch=lambda picture: live.update(progress(picture, setting, title)),
        )


class _Lines:
    """Print news line by line if the output is no terminal."""

    def __init__(self, console: Console, setting: Setting) -> None:
        self._console, self._setting = console, setting
        self._shown = 0
        self._step = 0

    def __call__(self, picture: Picture) -> None:
        for _, text in picture.news[self._shown :]:
            self._console.print(f"  {text}", markup=False, highlight=False)
        self._shown = len(picture.news)
        if picture.step >= self._step + 10 or (picture.step == self._setting.steps and picture.step != self._step):
            self._step = picture.step
            last = picture.steps[-1]
            text = f"  step {last.number}: loss {loss_text(last.loss)}, {last.seconds:.2f} s"
            self._console.print(text, highlight=False)


@contextlib.contextmanager
def clean_end() -> Iterator[Callable[[], None]]:
    """Raise SystemExit at the first Ctrl-C, SIGTERM or hang-up, and let no second one interrupt the cleanup.

    Yield what is called once a first one shall interrupt nothing either, until the end of the block. A hang-up is
    ignored where it was before, as by nohup. After one nothing is written to the terminal that is gone, which would be
    an error in the middle of the cleanup.
    """
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    if before[signal.SIGHUP] is signal.SIG_IGN:
        del before[signal.SIGHUP]
    # A terminal that is gone is none any more.
    terminals = [descriptor for descriptor in (1, 2) if os.isatty(descriptor)]
    settled = False

    def settle() -> None:
        nonlocal settled
        settled = True

    def end(number: int, frame: object) -> None:
        for each in before:
            signal.signal(each, signal.SIG_IGN)
        if number == signal.SIGHUP:
            _silence(terminals)
        if not settled:
            sys.exit(128 + number)

    for number in before:
        signal.signal(number, end)
    try:
        yield settle
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _silence(descriptors: Sequence[int]) -> None:
    """Have nobody hear what is written there from now on."""
    nobody = os.open(os.devnull, os.O_WRONLY)
    for descriptor in descriptors:
        os.dup2(nobody, descriptor)
    os.close(nobody)

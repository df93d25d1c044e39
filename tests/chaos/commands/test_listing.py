"""The catalogue in a terminal of 80 columns: every word on a line of its own, and what the machine lacks beside it."""

from __future__ import annotations

import dataclasses
import io
import os
import signal
import sys
from types import ModuleType

import pytest
from rich.console import Console
from typer.testing import CliRunner

from chaos.commands import listing, random_storms
from chaos.commands.app import app
from chaos.commands.listing import document, page, table
from chaos.faults.catalogue import KINDS
from chaos.faults.fault import Need
from chaos.schedules.restart import WORDS

# What is not looked for on this machine.
OF_JOBS = {Need.MEMBERS, Need.SLOTS, Need.SCRIPT}
KNOWN = [document(kind) for kind in KINDS.values() if kind.ABOUT.needs <= OF_JOBS]


def lines(missing: str) -> list[str]:
    """Return what a terminal of 80 columns shows where the machine lacks something for each fault."""
    console = Console(file=io.StringIO(), width=80)
    console.print(table([dataclasses.replace(one, missing=missing) for one in KNOWN]))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_every_word_stands_whole_at_the_beginning_of_a_line() -> None:
    """So that it can be read and searched for; nothing else is cut either."""
    shown = lines("")
    assert max(map(len, shown)) <= 80
    for one in KNOWN:
        (at,) = [line for line in shown if line.startswith(f"  {one.word} ")]
        assert at.split()[1] == one.happens.split()[0]
    text = " ".join(" ".join(shown).split())
    for one in KNOWN:
        assert f"Promised: {one.promised}." in text
        assert one.detector in text
    assert "Not on this machine" not in text


def test_what_the_machine_lacks_is_shown() -> None:
    """In the words of whoever looked for it, brackets and all."""
    why = "there is no S3 server or client here: pip install 'moto[server]' 'elastic3d[s3]'"
    text = " ".join(" ".join(lines(why)).split())
    assert text.count(f"Not on this machine: {why}") == len(KNOWN)


def test_what_a_job_under_mode_restart_can_meet_is_marked() -> None:
    """In a terminal, in the document and on the page alike: what a schedule of such a job is not refused for."""
    marked = {one.word for one in KNOWN if one.restart}
    assert marked == {one.word for one in KNOWN if one.word in WORDS}
    assert {"kill", "join", "cut"} <= {kind.WORD for kind in KINDS.values() if document(kind).restart}
    text = " ".join(" ".join(lines("")).split())
    assert text.count("Also under --mode restart.") == len(marked)
    assert "| `kill` (live, restart) |" in page()
    assert "| `join` (restart) |" in page()
    assert "| `kill-keeper` (live) |" in page()


@pytest.mark.parametrize(
    ("module", "name", "given"),
    [(listing, "document", ["list"]), (random_storms, "words_of", ["random", "--script", __file__])],
    ids=["list", "random"],
)
def test_what_is_tried_of_a_machine_is_undone_when_it_is_ended(
    module: ModuleType, name: str, given: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By SIGTERM too, which would leave file systems mounted and networks made."""
    undone = []

    def tried(*_: object, **__: object) -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            undone.append(sys.exc_info()[0])

    monkeypatch.setattr(module, name, tried)
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        result = CliRunner().invoke(app, given)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (result.exit_code, undone) == (128 + signal.SIGTERM, [SystemExit])

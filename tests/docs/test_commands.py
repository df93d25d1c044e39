"""The commands in the documentation work as they are printed."""

from __future__ import annotations

import functools
import itertools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import typer.main
from torch.distributed.elastic.rendezvous.api import RendezvousParameters
from torch.distributed.run import config_from_args, get_args_parser

from elastic3d.cli import application
from elastic3d.rendezvous.settings import from_parameters
from tests.paths import ROOT

PAGES = [*(ROOT / name for name in ("README.md", "SECURITY.md", "deploy/README.md")), *(ROOT / "docs").rglob("*.md")]
UsageError = typer.BadParameter.__bases__[0]


def commands(page: Path, name: str) -> Iterator[list[str]]:
    """Return the command lines of a program on a page, with continuation lines joined."""
    text = page.read_text().replace("\\\n", " ")
    for line in re.findall(rf"^ *(?:\$ |srun (?:-\S+ )*)?({name} .*)$", text, re.MULTILINE):
        try:
            words = shlex.split(line, comments=True)
        except ValueError:  # a sentence with an apostrophe
            continue
        yield list(itertools.takewhile(lambda word: word not in (">", "|", "||", "&&"), words))


@functools.cache
def program() -> Any:
    """Return the whole command line as a click command."""
    return typer.main.get_command(application())


def shown(words: list[str]) -> bool:
    """Return whether this is a command, not a sentence that begins a line or a usage line."""
    return len(words) > 1 and (words[1] in program().commands or words[1].startswith("-")) and "[OPTIONS]" not in words


def test_documented_commands_and_options_exist() -> None:
    """And the options take such values."""
    seen = 0
    for page in PAGES:
        for words in filter(shown, commands(page, "elastic3d")):
            command, rest = program(), words[1:]
            while rest and rest[0] in getattr(command, "commands", {}):
                command, rest = command.commands[rest[0]], rest[1:]
            try:
                command.make_context("elastic3d", rest)
            except UsageError as error:
                pytest.fail(f"{page.relative_to(ROOT)}: {shlex.join(words)}: {error}")
            seen += 1
    assert seen > 50


def test_documented_torchrun_options_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun knows the options, and the rendezvous its settings."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # torchrun sets it otherwise
    seen = 0
    for page in PAGES:
        for words in commands(page, "torchrun"):
            if "train.py" not in words:
                continue
            config, _, _ = config_from_args(get_args_parser().parse_args(words[1:]))
            from_parameters(
                RendezvousParameters(
                    backend=config.rdzv_backend,
                    endpoint="127.0.0.1:2379",  # others need not have a name here
                    run_id=config.run_id,
                    min_nodes=config.min_nodes,
                    max_nodes=config.max_nodes,
                    **config.rdzv_configs,
                )
            )
            seen += 1
    assert seen >= 6


def test_the_script_of_the_tutorial_compiles() -> None:
    """test_tutorial.py tests what it does."""
    for page in sorted((ROOT / "docs" / "tutorial").glob("*.md")):
        for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
            compile(block, str(page), "exec")

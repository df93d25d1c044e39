"""`elastic3d simulate commits`: the commit protocol under random schedules."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from chaos.commits.run import play, play_many
from chaos.commits.schedule import parse
from chaos.many import cli as many_cli
from elastic3d.errors import Elastic3dError


def commits(
    schedules: Annotated[int, typer.Option(help="Number of random schedules.")] = 2_000,
    seed: Annotated[int, typer.Option(help="Seed of the first schedule; each next one has the next seed.")] = 1,
    replay: Annotated[
        Path | None,
        typer.Option(help="Play the schedule in this file, as a failure prints it, instead of random ones."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
) -> None:
    """Save, fence, commit, restore and collect with the real functions on a model of an object store.

    Ranks, leaders (also several, also zombies), readers and collectors take turns at store operations; processes die,
    requests and answers are lost, repeated, or arrive late. After every operation `latest` has to name a complete
    checkpoint of one step, and nothing that was committed may be lost. A failure is printed as a small schedule that
    --replay plays again. The exit code is 1 if anything happened that must not.

    Examples:

        elastic3d simulate commits --schedules 10000 --seed 7

        elastic3d simulate commits --json | jq .failures

        elastic3d simulate commits --replay failure.txt
    """
    try:
        if replay is not None:
            kept = many_cli.replay(replay, lambda text: play(parse(text)))
        else:
            kept = many_cli.play_and_tell(play_many, schedules, seed, as_json=as_json)
    except Elastic3dError as error:
        print(f"elastic3d: {error}", file=sys.stderr)
        raise typer.Exit(error.exit_code) from None
    raise typer.Exit(0 if kept else 1)

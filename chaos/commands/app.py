"""`elastic3d chaos`: its commands, put together."""

from __future__ import annotations

import typer

from chaos.commands.inject import inject
from chaos.commands.listing import list_faults
from chaos.commands.random_storms import play_random
from chaos.commands.report import report
from chaos.commands.score import score
from chaos.commands.shrink import shrink_schedule
from chaos.commands.soak import soak
from chaos.commands.storm import replay, run_schedule
from elastic3d.cli.job import about_a_job

app = typer.Typer(
    name="chaos",
    help="Break real jobs on this machine, and judge what becomes of them; or a live one, if it allows that.",
    no_args_is_help=True,
)
app.callback()(lambda: None)
app.command("list")(list_faults)
app.command("run")(run_schedule)
app.command()(replay)
app.command()(about_a_job(inject))
app.command()(report)
app.command("random")(play_random)
app.command("shrink")(shrink_schedule)
app.command()(soak)
app.command()(score)

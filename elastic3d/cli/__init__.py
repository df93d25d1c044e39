"""The `elastic3d` command.

Commands of packages above this one (the demo) come through the entry point group `elastic3d.commands`, so that nothing
here imports them: each is a `typer.Typer`, mounted as a group of commands, or a function, mounted as one command.
"""

from __future__ import annotations

import sys
from importlib.metadata import entry_points, version
from typing import Annotated

import typer

from elastic3d.cli import agent, ckpt, etcd, islands, node_commands, samples, status
from elastic3d.cli.calibrate import calibrate
from elastic3d.cli.dashboard import dashboard
from elastic3d.cli.doctor import doctor
from elastic3d.cli.evaluate import evaluate
from elastic3d.cli.explain import explain_job
from elastic3d.cli.goodput import show_goodput
from elastic3d.cli.init import init
from elastic3d.cli.job import about_a_job
from elastic3d.cli.plan import plan
from elastic3d.cli.report import write_report
from elastic3d.cli.timeline import show_timeline
from elastic3d.cli.top.command import top
from elastic3d.errors import Elastic3dError

GROUP = "elastic3d.commands"
LOOK, ORDER, TRY = "Look at a live job", "Give orders to a live job", "Try it"
AHEAD, NODE, AFTER = "Before a job", "Run a node", "What a job did with its time"

_HELP = """Fault-tolerant elastic training for PyTorch: nodes come and go, the bits stay the same.

Examples:

    elastic3d init first --on local

    elastic3d demo --kill 1@20 --join @40

    elastic3d demo --nodes 3 --kill leader@10 --kill stage0@30 --json > history.json

    elastic3d top --endpoint e1:2379 --id gpt-1b

    elastic3d drain node-17 --deadline 30s

    elastic3d ckpt ls file:///data/gpt-1b

    elastic3d plan --model llama-7b --nodes 7 --slots 8 --device h200

A training job itself is started with torchrun; see docs/guides/cluster.md.
"""


def application() -> typer.Typer:
    """Return the command line with every command that is installed."""
    app = typer.Typer(
        name="elastic3d",
        help=_HELP,
        no_args_is_help=True,
        add_completion=True,
        rich_markup_mode="markdown",
        pretty_exceptions_show_locals=False,
    )
    # Without a callback typer would turn a single command into the whole application.
    app.callback()(_options)
    app.command("top", rich_help_panel=LOOK)(about_a_job(top))
    app.command("status", rich_help_panel=LOOK)(about_a_job(status.status))
    app.command("events", rich_help_panel=LOOK)(about_a_job(status.events))
    app.command("explain", rich_help_panel=LOOK)(about_a_job(explain_job))
    app.command("dashboard", rich_help_panel=LOOK)(about_a_job(dashboard))
    app.command("goodput", rich_help_panel=AFTER)(show_goodput)
    app.command("timeline", rich_help_panel=AFTER)(show_timeline)
    app.command("report", rich_help_panel=AFTER)(write_report)
    for name, command in (
        ("drain", node_commands.drain),
        ("quarantine", node_commands.quarantine),
        ("release", node_commands.release),
    ):
        app.command(name, rich_help_panel=ORDER)(about_a_job(command))
    app.command("agent", context_settings=agent.CONTEXT, rich_help_panel=NODE)(agent.agent)
    app.command("init", rich_help_panel=AHEAD)(init)
    app.command("doctor", rich_help_panel=AHEAD)(doctor)
    app.command("plan", rich_help_panel=AHEAD)(plan)
    app.command("calibrate", rich_help_panel=AHEAD)(calibrate)
    app.add_typer(etcd.app, name="etcd", rich_help_panel=AHEAD)
    app.add_typer(ckpt.app, name="ckpt", rich_help_panel="Look at checkpoints")
    app.command("eval", rich_help_panel="Look at checkpoints")(evaluate)
    app.add_typer(samples.app, name="samples", rich_help_panel="Look at checkpoints")
    app.add_typer(islands.app, name="islands", rich_help_panel="Look at checkpoints")
    own = {"islands", "ckpt", "etcd", "samples", *(command.name for command in app.registered_commands)}
    for point in sorted(entry_points(group=GROUP), key=lambda point: point.name):
        if point.name in own:
            continue
        loaded = point.load()
        if isinstance(loaded, typer.Typer):
            app.add_typer(loaded, name=point.name, rich_help_panel=TRY)
        else:
            app.command(name=point.name, rich_help_panel=TRY)(loaded)
    return app


def _options(
    show_version: Annotated[
        bool,
        typer.Option(
            "--version",
            help="Print the version and exit.",
            is_eager=True,
            callback=lambda wanted: _print_version() if wanted else None,
        ),
    ] = False,
) -> None:
    """Take the options that stand before any command."""


def _print_version() -> None:
    print(f"elastic3d {version('elastic3d')}")
    raise typer.Exit


def main() -> None:
    """Run the command line; an error of elastic3d's is printed in one line, with its own exit code."""
    try:
        application()()
    except Elastic3dError as error:
        print(f"elastic3d: {error}", file=sys.stderr)
        sys.exit(error.exit_code)

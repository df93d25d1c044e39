"""The `elastic3d` command.

Commands of packages that stand above this one (the demo) come through the entry point group `elastic3d.commands`, so
that nothing here imports them: a value is a `typer.Typer`, mounted as a group of commands, or a function, mounted as
one command.
"""

from __future__ import annotations

import sys
from importlib.metadata import entry_points

import typer

from elastic3d.cli import ckpt
from elastic3d.errors import Elastic3dError

GROUP = "elastic3d.commands"

_HELP = """Fault-tolerant elastic training for PyTorch: nodes come and go, the bits stay the same.

Examples:

    elastic3d demo --kill 1@20 --join @40

    elastic3d demo --nodes 3 --kill leader@10 --kill stage0@30 --json > history.json

    elastic3d ckpt ls file:///data/gpt-1b

A training job itself is started with torchrun; see the README.
"""


def application() -> typer.Typer:
    """Return the command line with every command that is installed."""
    app = typer.Typer(
        name="elastic3d",
        help=_HELP,
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode="markdown",
        pretty_exceptions_show_locals=False,
    )
    # Without a callback typer would turn a single command into the whole application.
    app.callback()(lambda: None)
    app.add_typer(ckpt.app, name="ckpt")
    for point in sorted(entry_points(group=GROUP), key=lambda point: point.name):
        command = point.load()
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=point.name)
        else:
            app.command(name=point.name)(command)
    return app


def main() -> None:
    """Run the command line; an error of ours is told in words, with its own exit code."""
    try:
        application()()
    except Elastic3dError as error:
        print(f"elastic3d: {error}", file=sys.stderr)
        sys.exit(error.exit_code)

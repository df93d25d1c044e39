"""`elastic3d ckpt`: look at checkpoints, check them, keep them, and exchange them with other tools.

One module for each group of commands; results are computed in `checkpointing.inspection` and displayed by `render`.
"""

from __future__ import annotations

from collections.abc import Callable

import typer

from elastic3d.cli.ckpt import (
    adapting,
    comparing,
    exporting,
    inspecting,
    interchange,
    keeping,
    listing,
    planning,
    provenance,
    reading,
)
from elastic3d.cli.ckpt.place import about_a_store

LOOK, CHECK, KEEP, EXCHANGE = "Look", "Read", "Keep", "Exchange"

_HELP = """Look at checkpoints, check them, keep them, exchange them with other tools.

URL is a directory or a place such as s3://bucket/prefix. A checkpoint is `latest`, `verified`, `vetted`, a tag, a step,
or a name or its beginning, and may also be given with the URL: s3://bucket/prefix@vetted. Every command takes `--json`.
Exit codes: 0; 2 for a wrong call; 1 for everything else.

Examples:

    elastic3d ckpt log s3://bucket/gpt-1b

    elastic3d ckpt show s3://bucket/gpt-1b verified

    elastic3d ckpt diff s3://bucket/gpt-1b 1000 1200

    elastic3d ckpt plan s3://bucket/gpt-1b --to pp=2,dp=4

    elastic3d ckpt verify s3://bucket/gpt-1b
"""

_COMMANDS: dict[str, dict[str, Callable[..., None]]] = {
    LOOK: {
        "ls": listing.ls,
        "log": listing.log,
        "show": inspecting.show,
        "tree": inspecting.tree,
        "du": listing.du,
        "stats": inspecting.stats,
        "diff": comparing.diff,
        "plan": planning.plan,
        "provenance": provenance.provenance,
    },
    CHECK: {"cat": reading.cat, "verify": reading.verify_store},
    KEEP: {
        "tag": keeping.tag,
        "untag": keeping.untag,
        "pin": keeping.pin,
        "unpin": keeping.unpin,
        "gc": keeping.gc,
        "repair": keeping.repair,
    },
    EXCHANGE: {"adapters": adapting.adapters, "import": interchange.import_, "export": exporting.export},
}


def application() -> typer.Typer:
    """Return the group of commands."""
    app = typer.Typer(name="ckpt", help=_HELP, no_args_is_help=True, rich_markup_mode="markdown")
    for panel, commands in _COMMANDS.items():
        for name, command in commands.items():
            app.command(name, rich_help_panel=panel)(about_a_store(command))
    return app


app = application()

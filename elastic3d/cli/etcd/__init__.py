"""`elastic3d etcd`: the etcd of a team that has nobody to run one."""

from __future__ import annotations

import typer

from elastic3d.cli.etcd.copies import backup, restore
from elastic3d.cli.etcd.status import status
from elastic3d.cli.etcd.up import up

app = typer.Typer(
    name="etcd",
    help="Run an etcd, back it up, and see how it is.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)
app.command("up")(up)
app.command("status")(status)
app.command("backup")(backup)
app.command("restore")(restore)

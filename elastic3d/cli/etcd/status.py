"""`elastic3d etcd status`: every member, and what follows from what they say."""

from __future__ import annotations

import json

import typer
from rich.console import Console
from rich.table import Table

from elastic3d.cli.etcd import options
from elastic3d.cli.render import clean
from elastic3d.doctor.words import spell_size
from elastic3d.etcd_server.status import ServersStatus, ServerState, read_status
from elastic3d.values import to_json

SCHEMA = 1


def status(
    data: options.Folder = None,
    endpoint: options.At = "127.0.0.1:2379",
    user: options.User = "",
    password_file: options.PasswordFile = "",
    ca: options.Ca = "",
    cert: options.Cert = "",
    key: options.Key = "",
    as_json: options.AsJson = False,
) -> None:
    """Say of each member whether it leads, follows or is away, its version and its size, and what to do about it.

    Exit code 1 where etcd takes no writes.

    Examples:

        elastic3d etcd status --data etcd-data

        elastic3d etcd status --endpoint e1:2379,e2:2379,e3:2379 --json
    """
    at = options.etcd_at(data, endpoint, user, password_file, ca, cert, key)
    seen = read_status(at.endpoints, lambda one: at.client([one]))
    if as_json:
        print(json.dumps({"schema": SCHEMA, **to_json(seen)}))
    else:
        _show(seen)
    if not seen.serving:
        raise typer.Exit(1)


def _show(seen: ServersStatus) -> None:
    table = Table("Endpoint", "State", "Version", "In use", "On disk", "Member", box=None, pad_edge=False)
    for one in seen.members:
        sizes = ("", "") if one.state is ServerState.AWAY else (spell_size(one.in_use), spell_size(one.size))
        table.add_row(one.endpoint, str(one.state), one.version, *sizes, one.member)
    console = Console(soft_wrap=True)
    console.print(table)
    for one in seen.members:
        if one.problem:
            console.print(f"{one.endpoint}: {clean(one.problem)}", markup=False, highlight=False)
    for warning in seen.warnings:
        console.print(f"warning: {clean(warning)}", markup=False, highlight=False)

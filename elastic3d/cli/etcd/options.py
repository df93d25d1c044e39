"""The options of `elastic3d etcd`: which server to run, and which one to talk to."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from elastic3d import environment
from elastic3d.cli.job import JobOptions
from elastic3d.errors import UsageError
from elastic3d.etcd import Endpoint, EtcdClient, Tls, parse_endpoints, password_warning
from elastic3d.etcd_server.binary import Version, etcd_version, find_etcd, require_sound
from elastic3d.etcd_server.cluster import ServerCluster, client_tls, new_cluster, read_cluster

TIMEOUT, BUDGET = 2.0, 3.0
_CLUSTER, _SERVER, _WHERE = "Which members", "Which program", "Which etcd"

Data = Annotated[Path, typer.Option("--data", metavar="DIR", help="Its folder.", show_default=False)]
Members = Annotated[
    int | None,
    typer.Option("--members", help="How many, on this machine.", rich_help_panel=_CLUSTER, show_default="3"),
]
Port = Annotated[
    int | None,
    typer.Option(
        "--port",
        help="Of the first one's clients; its peers have the next, a second member the next two.",
        rich_help_panel=_CLUSTER,
        show_default="free ones; with --hosts 2379",
    ),
]
Encrypted = Annotated[bool, typer.Option("--tls", help="With certificates, which it makes.", rich_help_panel=_CLUSTER)]
Hosts = Annotated[
    str,
    typer.Option(
        "--hosts", metavar="HOST,...", help="One member on each.", rich_help_panel=_CLUSTER, show_default=False
    ),
]
Host = Annotated[
    str,
    typer.Option("--host", help="Which of --hosts this machine is.", rich_help_panel=_CLUSTER, show_default=False),
]
Binary = Annotated[
    str,
    typer.Option("--binary", metavar="PATH", help="The etcd program.", rich_help_panel=_SERVER, show_default="on PATH"),
]
AllowVersion = Annotated[
    str,
    typer.Option(
        "--allow-version",
        metavar="VERSION",
        help="Take this one, though it is known to lose data: to try things.",
        rich_help_panel=_SERVER,
        show_default=False,
    ),
]
Folder = Annotated[
    Path | None,
    typer.Option(
        "--data", metavar="DIR", help="That of `etcd up` in this folder.", rich_help_panel=_WHERE, show_default=False
    ),
]
At = Annotated[
    str,
    typer.Option(
        "--endpoint",
        metavar="HOST:PORT,...",
        envvar=environment.ENDPOINT.name,
        help="As given to --rdzv-endpoint.",
        rich_help_panel=_WHERE,
    ),
]
User = Annotated[str, typer.Option("--user", help="etcd user.", rich_help_panel=_WHERE, show_default=False)]
PasswordFile = Annotated[
    str,
    typer.Option(
        "--password-file", metavar="FILE", help="Holds the user's password.", rich_help_panel=_WHERE, show_default=False
    ),
]
Ca = Annotated[
    str,
    typer.Option(
        "--ca", metavar="FILE", help="Who signed its certificates.", rich_help_panel=_WHERE, show_default=False
    ),
]
Cert = Annotated[
    str,
    typer.Option("--cert", metavar="FILE", help="A client certificate.", rich_help_panel=_WHERE, show_default=False),
]
Key = Annotated[
    str, typer.Option("--key", metavar="FILE", help="Its private key.", rich_help_panel=_WHERE, show_default=False)
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdAt:
    """Where an etcd is, and how it lets us in."""

    endpoints: tuple[Endpoint, ...]
    tls: Tls | None
    user: str = ""
    password: str | None = None

    def client(self, endpoints: Sequence[Endpoint]) -> EtcdClient:
        """Return a client of some of its members."""
        return EtcdClient(
            [str(endpoint) for endpoint in endpoints],
            user=self.user or None,
            password=self.password,
            tls=self.tls,
            timeout=TIMEOUT,
            budget=BUDGET,
        )


def etcd_at(data: Path | None, endpoint: str, user: str, password_file: str, ca: str, cert: str, key: str) -> EtcdAt:
    """Return the etcd that the options name; UsageError if they contradict each other or name none."""
    options = JobOptions(endpoint=endpoint, user=user, password_file=password_file, ca=ca, cert=cert, key=key)
    password, tls = options.password(), options.tls()
    if data is not None:
        cluster = read_cluster(data)
        if cluster is None:
            raise UsageError(f"--data {data}: there is no cluster; `elastic3d etcd up --data {data}` makes one")
        tls = tls or client_tls(cluster, data)
        endpoint = cluster.endpoint
    endpoints = parse_endpoints(endpoint, tls=tls is not None)
    if user and (warning := password_warning(user, endpoints)):
        print(f"elastic3d: {warning}", file=sys.stderr)
    return EtcdAt(endpoints=endpoints, tls=tls, user=user, password=password)


def program(binary: str, allowed: str) -> tuple[Path, Version]:
    """Return the etcd to run and its version; ConfigurationError if there is none, or it loses data."""
    path = find_etcd(binary or None)
    version = etcd_version(path)
    require_sound(path, version, allowed)
    return path.absolute(), version


def asked_cluster(
    members: int | None, port: int | None, tls: bool, hosts: str, host: str, token: str = ""
) -> ServerCluster:
    """Return the cluster that the options ask for."""
    names = [name.strip() for name in hosts.split(",") if name.strip()]
    if hosts and not names:
        raise UsageError(f"--hosts {hosts!r}: name the machines, as e1,e2,e3")
    return new_cluster(members=members, hosts=names, here=host, port=port, tls=tls, token=token)


def checked_folder(data: Path) -> Path:
    """Return the whole path of a folder; UsageError for one that could not be named in --rdzv-conf."""
    folder = data.absolute()
    if not str(folder).isprintable() or set(str(folder)) & set(",= "):
        raise UsageError(f"--data {str(data)!r}: give a folder without spaces, commas and equals signs in its path")
    return folder

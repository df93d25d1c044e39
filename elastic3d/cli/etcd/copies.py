"""`elastic3d etcd backup` and `restore`: all keys of an etcd as one file, and a new cluster of such a file."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from elastic3d.cli.etcd import options
from elastic3d.doctor.words import spell_size
from elastic3d.errors import UsageError
from elastic3d.etcd_server.cluster import read_cluster
from elastic3d.etcd_server.snapshot import restore as restore_cluster
from elastic3d.etcd_server.snapshot import save, verify
from elastic3d.quantities import some_seconds
from elastic3d.values import to_json

SCHEMA = 1
_File = Annotated[Path, typer.Argument(metavar="FILE", help="The snapshot.", show_default=False)]


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdSnapshot:
    """A whole snapshot of an etcd."""

    file: str
    size: int
    """Bytes of the file."""
    digest: str
    """The SHA-256 of the database in it, in hexadecimal: what the file's last 32 bytes say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdRestored:
    """A folder that was made of a snapshot."""

    file: str
    data: str
    endpoint: str
    """Where its members will serve, for `--rdzv-endpoint`."""


def backup(
    file: _File,
    data: options.Folder = None,
    endpoint: options.At = "127.0.0.1:2379",
    user: options.User = "",
    password_file: options.PasswordFile = "",
    ca: options.Ca = "",
    cert: options.Cert = "",
    key: options.Key = "",
    limit: Annotated[str, typer.Option("--limit", metavar="TIME", help="How long it may take.")] = "10m",
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
    as_json: options.AsJson = False,
) -> None:
    """Save all keys of an etcd to one file, which is there when it is whole, and not before.

    Needs no etcd program: any member that answers is asked over the network, also the last one of a cluster that has
    lost its majority. The digest that etcd sends with it is compared. The file holds secrets, and is yours alone.

    Examples:

        elastic3d etcd backup jobs.db --data etcd-data

        elastic3d etcd backup jobs.db --endpoint e1:2379,e2:2379 --ca ca.pem --cert root.pem --key root.key
    """
    seconds = some_seconds(limit, "--limit")
    at = options.etcd_at(data, endpoint, user, password_file, ca, cert, key)
    with at.client(at.endpoints) as client:
        facts = save(client.snapshot(limit=seconds), file, force=force)
    if as_json:
        document = EtcdSnapshot(file=str(file), size=facts.size, digest=facts.digest)
        print(json.dumps({"schema": SCHEMA, **to_json(document)}))
    else:
        print(f"{file}: {spell_size(facts.size)}, whole; sha256 {facts.digest}")


def restore(
    file: _File,
    data: options.Data,
    members: options.Members = None,
    port: options.Port = None,
    tls: options.Encrypted = False,
    hosts: options.Hosts = "",
    host: options.Host = "",
    binary: options.Binary = "",
    allow_version: options.AllowVersion = "",
    as_json: options.AsJson = False,
) -> None:
    """Make the folder of a new cluster from a snapshot; `elastic3d etcd up --data DIR` then runs it.

    The cluster may have other members and addresses than the one the snapshot is of. DIR has to be empty, or not there:
    it is made at once when all is done. With --hosts, the same snapshot and the same options go to each host.

    Examples:

        elastic3d etcd restore jobs.db --data etcd-again --port 2379

        elastic3d etcd restore jobs.db --data /var/lib/etcd-jobs --hosts e1,e2,e3 --host e2 --tls
    """
    facts = verify(file)
    path, _version = options.program(binary, allow_version)
    folder = options.checked_folder(data)
    if read_cluster(folder) is not None:
        raise UsageError(f"--data {data}: a cluster is there already; give an empty folder, or move that one away")
    # Of the snapshot, so that each host has the same; and none that the cluster before had.
    cluster = options.asked_cluster(members, port, tls, hosts, host, token=f"elastic3d-{facts.digest[:16]}")
    restore_cluster(file.absolute(), cluster, folder, path)
    if as_json:
        document = EtcdRestored(file=str(file), data=str(folder), endpoint=cluster.endpoint)
        print(json.dumps({"schema": SCHEMA, **to_json(document)}))
    else:
        print(f"{folder}: made of {file}, for {cluster.endpoint}; run it: elastic3d etcd up --data {data}")

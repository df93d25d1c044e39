"""What a folder of data is of: the members of a cluster, their addresses, and the arguments that each is started with.

The folder has `cluster.json`, written when it is made; a member's data in a folder of its name, its log beside it; and
`certificates`. So `elastic3d etcd up --data DIR` finds the same members at the same addresses each time.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from elastic3d.errors import ConfigurationError, UsageError
from elastic3d.etcd import Tls
from elastic3d.etcd_server.binary import Version
from elastic3d.etcd_server.certificates import Certificates
from elastic3d.etcd_server.process import free_ports
from elastic3d.values import from_json, to_json

FILE = "cluster.json"

CERTIFICATES = "certificates"
"""Beside it: the first host makes them, and people copy them to the others before anything runs there."""

SCHEMA = 1
LOOPBACK = "127.0.0.1"
CLIENT_PORT = 2379
MOST_MEMBERS = 7
"""More make an etcd slower, and no safer in practice."""
QUOTA = 2 << 30
"""Bytes of the database beyond which etcd takes no writes, as in deploy/."""
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerMember:
    """A member and its addresses."""

    name: str
    host: str
    client_port: int
    peer_port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerCluster:
    """A cluster. token: keeps its members apart from others'. here: the member of this host, "" if all are.

    started: it has served once, so that a member without data has lost them.
    """

    token: str
    members: tuple[ServerMember, ...]
    tls: bool
    here: str = ""
    started: bool = False

    @property
    def own(self) -> tuple[ServerMember, ...]:
        """The members that run on this machine."""
        return tuple(member for member in self.members if self.here in ("", member.name))

    @property
    def endpoint(self) -> str:
        """All client addresses in one text, as `--rdzv-endpoint` takes them."""
        return ",".join(f"{member.host}:{member.client_port}" for member in self.members)

    @property
    def quorum(self) -> int:
        """How many members have to be there for it to serve."""
        return len(self.members) // 2 + 1


def new_cluster(
    *, members: int | None, hosts: Sequence[str], here: str, port: int | None, tls: bool, token: str = ""
) -> ServerCluster:
    """Return a cluster of these options; UsageError for what cannot be.

    hosts: one member on each, `here` on this one; none: all `members` on loopback. port: of the first member's clients;
    its peers have the next one, and a second member on this machine the next two. None: 2379 on hosts, and free ones on
    loopback. token: "" for one of its own.
    """
    if port is not None and not 1 <= port <= 65535 - 2 * MOST_MEMBERS:
        raise UsageError(f"--port {port}: give 1 to {65535 - 2 * MOST_MEMBERS}")
    if hosts:
        return _on_hosts(members, hosts, here, CLIENT_PORT if port is None else port, tls, token)
    if here:
        raise UsageError(f"--host {here!r} is one of several: name all of them by --hosts e1,e2,e3")
    count = 3 if members is None else members
    if not 1 <= count <= MOST_MEMBERS:
        raise UsageError(f"--members {count}: give 1, 3 or 5")
    ports = free_ports(2 * count) if port is None else list(range(port, port + 2 * count))
    return ServerCluster(
        token=token or f"elastic3d-{secrets.token_hex(8)}",
        members=tuple(
            ServerMember(name=f"m{n}", host=LOOPBACK, client_port=ports[2 * n], peer_port=ports[2 * n + 1])
            for n in range(count)
        ),
        tls=tls,
    )


def _on_hosts(members: int | None, hosts: Sequence[str], here: str, port: int, tls: bool, token: str) -> ServerCluster:
    for host in hosts:
        if not _HOST.fullmatch(host):
            raise UsageError(f"--hosts: {host!r} is no name or IPv4 address of a machine")
    if len(set(hosts)) != len(hosts) or not 1 <= len(hosts) <= MOST_MEMBERS:
        raise UsageError(f"--hosts: give each host once, and at most {MOST_MEMBERS}")
    if members not in (None, len(hosts)):
        raise UsageError(f"--members {members} and {len(hosts)} hosts: leave --members out, each host has one")
    if here not in hosts:
        raise UsageError(f"--host {here!r}: say which of {', '.join(hosts)} this machine is")
    names = {host: re.sub(r"[^A-Za-z0-9]", "-", host) for host in hosts}
    if len({*names.values()}) != len(names):
        raise UsageError("--hosts: two of them differ only in dots and hyphens; give other names")
    return ServerCluster(
        # The same on each host, without a word between them.
        token=token or f"elastic3d-{'-'.join(names.values())}-{port}",
        members=tuple(
            ServerMember(name=names[host], host=host, client_port=port, peer_port=port + 1) for host in hosts
        ),
        tls=tls,
        here=names[here],
    )


def arguments(cluster: ServerCluster, member: ServerMember, folder: Path, version: Version) -> list[str]:
    """Return the arguments of a member whose data are in `folder`."""
    scheme = "https" if cluster.tls else "http"
    listen = member.host if member.host == LOOPBACK else "0.0.0.0"
    flags = {
        "name": member.name,
        "data-dir": str(folder / member.name),
        "listen-client-urls": f"{scheme}://{listen}:{member.client_port}",
        "advertise-client-urls": f"{scheme}://{member.host}:{member.client_port}",
        "listen-peer-urls": f"{scheme}://{listen}:{member.peer_port}",
        "initial-advertise-peer-urls": peer_url(cluster, member),
        "initial-cluster": initial_cluster(cluster),
        "initial-cluster-token": cluster.token,
        "initial-cluster-state": "new",
        "logger": "zap",
        "log-level": "warn",
        "auto-compaction-mode": "periodic",
        "auto-compaction-retention": "1h",
        "quota-backend-bytes": str(QUOTA),
    }
    if len(cluster.members) == 1:
        # Nobody to wait for: the only member elects itself at once.
        flags |= {"heartbeat-interval": "50", "election-timeout": "300"}
    if version < (3, 6):
        # Later ones have it behind a feature gate.
        flags["experimental-initial-corrupt-check"] = "true"
        # Writes that are kept in memory for members that were away. Later ones keep so many by default; before, it was
        # 100,000, and 12,000 writes of 700 bytes were seen to take 25 MB.
        flags["snapshot-count"] = "10000"
    if cluster.tls:
        files = certificates(folder)
        for whom in ("", "peer-"):
            flags |= {
                f"{whom}cert-file": str(files.server),
                f"{whom}key-file": str(files.server_key),
                f"{whom}trusted-ca-file": str(files.ca),
                f"{whom}client-cert-auth": "true",
            }
    return [f"--{name}={value}" for name, value in flags.items()]


def peer_url(cluster: ServerCluster, member: ServerMember) -> str:
    """Return where the others reach a member."""
    return f"{'https' if cluster.tls else 'http'}://{member.host}:{member.peer_port}"


def initial_cluster(cluster: ServerCluster) -> str:
    """Return all members as `--initial-cluster` takes them."""
    return ",".join(f"{member.name}={peer_url(cluster, member)}" for member in cluster.members)


def certificates(folder: Path) -> Certificates:
    """Return where a cluster's certificates are."""
    return Certificates(directory=folder / CERTIFICATES)


def client_tls(cluster: ServerCluster, folder: Path) -> Tls | None:
    """Return what a client of the cluster needs; ConfigurationError if files are missing."""
    return certificates(folder).tls() if cluster.tls else None


def read_cluster(folder: Path) -> ServerCluster | None:
    """Return the cluster of a folder, None if that is empty or not there; UsageError for a folder of something else."""
    try:
        text = (folder / FILE).read_text()
    except FileNotFoundError:
        text = ""
    except NotADirectoryError as error:
        raise UsageError(f"--data {folder}: it is no folder; give a folder") from error
    except (OSError, UnicodeError) as error:
        raise UsageError(f"{folder / FILE} cannot be read: {error}") from error
    if not text:
        try:
            others = [path.name for path in folder.iterdir() if path.name not in (FILE, CERTIFICATES)]
        except FileNotFoundError:
            return None
        except OSError as error:
            raise UsageError(f"--data {folder}: {error.strerror}; give a folder") from error
        if others:
            raise UsageError(
                f"{folder} has no {FILE}, and holds {', '.join(sorted(others)[:3])}: it is no folder of `elastic3d "
                "etcd`; give an empty one, or one that is not there yet"
            )
        return None
    try:
        parts = json.loads(text)
        cluster = from_json(ServerCluster, parts) if parts.pop("schema") == SCHEMA else None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"{folder / FILE} is damaged ({error}): the data beside it are not touched; restore that file from a copy, "
            "or a backup of etcd into another folder"
        ) from error
    if cluster is None:
        raise UsageError(f"{folder / FILE} was written by another version of elastic3d; use that one")
    if not cluster.own:
        raise UsageError(f"{folder / FILE} is damaged: it names no member of this machine; restore it from a copy")
    return cluster


def write_cluster(folder: Path, cluster: ServerCluster) -> None:
    """Write which cluster a folder is of, at once; ConfigurationError says why not."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        number, name = tempfile.mkstemp(prefix=f".{FILE}.", dir=folder)
        try:
            with open(number, "w") as file:
                file.write(json.dumps({"schema": SCHEMA, **to_json(cluster)}, indent=2) + "\n")
                file.flush()
                os.fsync(file.fileno())
            Path(name).replace(folder / FILE)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise ConfigurationError(
            f"{folder / FILE} cannot be written: {error.strerror}; mend that, try again"
        ) from error


def same_cluster(there: ServerCluster, asked: ServerCluster, *, ports: bool) -> None:
    """Raise UsageError if a folder's cluster is not the one that is asked for. ports: they were asked for, too."""
    alike = replace(asked, token=there.token, started=there.started)
    if not ports:
        alike = replace(
            alike,
            members=tuple(
                replace(one, client_port=old.client_port, peer_port=old.peer_port)
                for one, old in zip(alike.members, there.members, strict=False)
            ),
        )
    if len(asked.members) != len(there.members) or alike != there:
        raise UsageError(
            f"the folder's cluster is {initial_cluster(there)}: it keeps its members, addresses and encryption; leave "
            "--members, --port, --tls, --host and --hosts out, or give another folder"
        )

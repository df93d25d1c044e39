"""`elastic3d etcd up`: a cluster on this machine, or this machine's member of one, until Ctrl-C."""

from __future__ import annotations

import json
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

from elastic3d import output
from elastic3d.cli.etcd import options
from elastic3d.errors import ConfigurationError
from elastic3d.etcd_server.binary import spell_version
from elastic3d.etcd_server.certificates import COMMON_NAMES, Certificates, can_be_made
from elastic3d.etcd_server.cluster import (
    LOOPBACK,
    ServerCluster,
    certificates,
    read_cluster,
    same_cluster,
    write_cluster,
)
from elastic3d.etcd_server.supervisor import Supervisor, only_one
from elastic3d.values import to_json

SCHEMA = 1
AUTHORITY_DAYS, CERTIFICATE_DAYS, RENEWED_BEFORE = 3650, 365, 30


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdUpMember:
    """A member that runs on this machine."""

    name: str
    endpoint: str
    """Its clients' address."""
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdUp:
    """An etcd that serves, as `elastic3d etcd up --json` says once."""

    version: str
    data: str
    endpoint: str
    """For `--rdzv-endpoint`."""
    conf: str
    """For `--rdzv-conf`."""
    members: tuple[EtcdUpMember, ...]


def up(
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
    """Run an etcd until Ctrl-C or SIGTERM, and start a member again that dies.

    Its members, addresses and certificates are in DIR, so that the next time --data is enough. Members on one machine
    stand the loss of a process, not of the machine; with --hosts there is one on each of several machines, where the
    same command runs. Versions that are known to lose data are refused. Nothing is left running, however this ends.

    Examples:

        elastic3d etcd up --data etcd-data

        elastic3d etcd up --data etcd-data --members 1 --port 2379 --allow-version 3.5.1

        elastic3d etcd up --data /var/lib/etcd-jobs --hosts e1,e2,e3 --host e1 --tls
    """
    path, version = options.program(binary, allow_version)
    folder = options.checked_folder(data)
    before = read_cluster(folder)
    asked = _asked(before, members, port, tls, hosts, host)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"--data {data}: {error.strerror}; give a folder that can be made") from error
    with only_one(folder), _until_told() as stop:
        cluster = _cluster(folder, asked, ports=port is not None)
        _ready(cluster, folder)
        if cluster.here and len(cluster.members) > 1:
            print(_others(cluster, data), file=sys.stderr, flush=True)
        supervisor = Supervisor(
            cluster=cluster, folder=folder, binary=path, version=version, say=output.say, over=lambda: stop.told > 0
        )
        try:
            if supervisor.start():
                if not cluster.started:
                    write_cluster(folder, replace(cluster, started=True))
                _tell(cluster, folder, spell_version(version), supervisor.pids(), as_json=as_json)
                supervisor.watch()
        finally:
            supervisor.close()
    print("elastic3d: etcd: stopped", file=sys.stderr)


def _asked(
    before: ServerCluster | None, members: int | None, port: int | None, tls: bool, hosts: str, host: str
) -> ServerCluster:
    """Return the cluster of the options; of those that were not given, what the folder's cluster has."""
    if before is not None and _kept(before):
        tls = tls or before.tls
        if before.here and not hosts:
            hosts = ",".join(member.host for member in before.members)
        if before.here and not host:
            host = before.own[0].host
        if members is None and not hosts:
            members = len(before.members)
    return options.asked_cluster(members, port, tls, hosts, host)


def _kept(cluster: ServerCluster) -> bool:
    """Return whether a folder's cluster has, or may have, anything to keep."""
    return cluster.started or cluster.here != ""


def _cluster(folder: Path, asked: ServerCluster, *, ports: bool) -> ServerCluster:
    """Return the folder's cluster, which is made if there is none, or made anew if it has never served."""
    before = read_cluster(folder)
    if before is not None and _kept(before):
        same_cluster(before, asked, ports=ports)
        return before
    if before is not None:
        for member in before.own:
            shutil.rmtree(folder / member.name, ignore_errors=True)
    write_cluster(folder, asked)
    return asked


def _ready(cluster: ServerCluster, folder: Path) -> None:
    """Make certificates where there are none, and those anew that are over soon."""
    if not cluster.tls:
        return
    files = certificates(folder)
    if not files.ca.exists():
        if cluster.here not in ("", cluster.members[0].name):
            raise ConfigurationError(
                f"etcd: {files.directory} is not there: the first host, {cluster.members[0].host}, makes the "
                "certificates of all; start it there, and copy that folder to the same place here"
            )
        files.directory.mkdir(mode=0o700, exist_ok=True)
        hosts = [member.host for member in cluster.members if member.host != LOOPBACK]
        Certificates.make(files.directory, also=hosts, days=AUTHORITY_DAYS, authority="elastic3d etcd")
        return
    if not can_be_made():
        # A host to which they were copied needs it for nothing else.
        output.say(
            "etcd: the openssl program is not on PATH: whether certificates are over soon is not looked at, and "
            "none is renewed here"
        )
        return
    for name in COMMON_NAMES:
        if files.ends_within(name, RENEWED_BEFORE):
            if not (files.directory / "ca.key").exists():
                output.say(
                    f"etcd: {files.directory / name}.pem is over within {RENEWED_BEFORE} days, and ca.key, by "
                    "which it would be renewed, is not there: renew it on the first host, and copy it"
                )
                continue
            files.renew(name, days=CERTIFICATE_DAYS)


def _conf(cluster: ServerCluster, folder: Path) -> str:
    if not cluster.tls:
        return "mode=resident"
    files = certificates(folder)
    return f"mode=resident,ca={files.ca},cert={files.client},key={files.client_key}"


def _tell(cluster: ServerCluster, folder: Path, version: str, pids: dict[str, int], *, as_json: bool) -> None:
    conf = _conf(cluster, folder)
    running = tuple(
        EtcdUpMember(name=one.name, endpoint=f"{one.host}:{one.client_port}", pid=pids[one.name]) for one in cluster.own
    )
    if as_json:
        document = EtcdUp(version=version, data=str(folder), endpoint=cluster.endpoint, conf=conf, members=running)
        print(json.dumps({"schema": SCHEMA, **to_json(document)}), flush=True)
        return
    lines = [f"etcd {version} serves, from {folder}; Ctrl-C stops it"]
    lines += [f"  {one.name}  {one.endpoint}  process {one.pid}" for one in running]
    lines += ["for torchrun:", f"  --rdzv-backend=etcd --rdzv-endpoint={cluster.endpoint} --rdzv-conf={conf}"]
    print("\n".join(lines), flush=True)


def _others(cluster: ServerCluster, data: Path) -> str:
    """Return what to do on the other hosts."""
    hosts = ",".join(member.host for member in cluster.members)
    rest = [member.host for member in cluster.members if member.name != cluster.here]
    command = f"elastic3d etcd up --data {data} --hosts {hosts} --host {rest[0]}{' --tls' if cluster.tls else ''}"
    copied = f", with a copy of {data / 'certificates'}, ca.key left out" if cluster.tls else ""
    return f"elastic3d: etcd: waiting for a majority; on {' and '.join(rest)} start the same{copied}: {command}"


class _Told:
    """How often a signal has told this process to stop."""

    def __init__(self) -> None:
        self.told = 0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.told += 1
        if self.told > 1:
            raise KeyboardInterrupt


@contextmanager
def _until_told() -> Iterator[_Told]:
    """Count the signals that say stop; the second one is KeyboardInterrupt. Those ignored, as under nohup, stay so."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    stop = _Told()
    heeded = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, stop) for number in heeded}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

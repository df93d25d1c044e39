"""The members of this machine, kept running: started, watched, started again when one ends, and stopped in order."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from elastic3d.clock import SYSTEM, Clock
from elastic3d.errors import ConfigurationError, EtcdError, EtcdUnavailable
from elastic3d.etcd import EtcdClient
from elastic3d.etcd_server.binary import Version
from elastic3d.etcd_server.cluster import LOOPBACK, ServerCluster, ServerMember, arguments, client_tls
from elastic3d.etcd_server.process import launch
from elastic3d.etcd_server.reasons import reason
from elastic3d.etcd_server.restarts import Restart, next_restart

POLL = 0.1
"""Seconds between two looks at the members."""

START_TIMEOUT = 60.0
"""Seconds in which all members of this machine have to serve."""

STOP_TIMEOUT = 10.0
"""Seconds that a member has to end after SIGTERM."""

MOST_READ = 1 << 20
"""Bytes at the end of a log in which the reason of an end is looked for."""

MOST_LOG = 16 << 20
"""Bytes of a log beyond which the next start of its member begins another one."""


@dataclass(slots=True)
class _Running:
    """A member and its process. ends: in a row; due: its next start, while it is down. begins: of its log, in bytes."""

    member: ServerMember
    log: Path
    process: subprocess.Popen[bytes] | None = None
    started: float = 0.0
    begins: int = 0
    ends: int = 0
    due: Restart | None = None


@dataclass(slots=True, kw_only=True)
class Supervisor:
    """Runs the members of one folder. Not thread-safe: for the main thread, with which its processes end.

    say: takes a line for people about each member that ends. over: returns whether to stop; asked ten times a second.
    """

    cluster: ServerCluster
    folder: Path
    binary: Path
    version: Version
    say: Callable[[str], None]
    over: Callable[[], bool]
    clock: Clock = SYSTEM
    _members: list[_Running] = field(default_factory=list)

    def start(self) -> bool:
        """Start all members and return when each serves; False if it was stopped before that.

        ConfigurationError names a member that ended, and why. On several hosts it waits for the others without limit.
        """
        if self.cluster.started:
            self._require_data(self.cluster.own)
        for member in self.cluster.own:
            _require_ports(member)
        for member in self.cluster.own:
            running = _Running(member=member, log=self.folder / f"{member.name}.log")
            self._members.append(running)
            self._launch(running)
        deadline = self.clock.monotonic() + START_TIMEOUT
        with ExitStack() as clients:
            waiting = {running.member.name: clients.enter_context(self._client(running)) for running in self._members}
            while waiting and not self.over():
                for running in self._members:
                    if not _alive(running):
                        raise ConfigurationError(f"etcd: {running.member.name} does not start: {self._why(running)}")
                    if running.member.name in waiting and _serves(waiting[running.member.name]):
                        del waiting[running.member.name]
                if not self.cluster.here and self.clock.monotonic() > deadline:
                    raise EtcdUnavailable(
                        f"etcd: {', '.join(waiting)} did not serve within {START_TIMEOUT:.0f} s; trying again may help "
                        f"on a busy machine; logs are in {self.folder}"
                    )
                self.clock.sleep(POLL)
        return not waiting

    def watch(self) -> None:
        """Keep the members running until it is over."""
        while not self.over():
            for running in self._members:
                self._look(running)
            self.clock.sleep(POLL)

    def close(self) -> None:
        """Stop the members one after another, the last first, each in its own time; kill all if that is interrupted."""
        try:
            for running in reversed(self._members):
                self._stop(running)
        finally:
            for running in self._members:
                if running.process is not None:
                    running.process.kill()
                    running.process.wait()
                    running.process = None

    def _stop(self, running: _Running) -> None:
        if running.process is None:
            return
        running.process.send_signal(signal.SIGTERM)
        running.process.send_signal(signal.SIGCONT)  # where somebody had stopped it
        try:
            running.process.wait(STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            self.say(f"etcd: {running.member.name} did not end within {STOP_TIMEOUT:.0f} s, and is killed")

    def pids(self) -> dict[str, int]:
        """Return the process id of each member that runs, by its name."""
        return {one.member.name: one.process.pid for one in self._members if one.process is not None}

    def _look(self, running: _Running) -> None:
        now = self.clock.monotonic()
        if running.due is not None:
            if now >= running.due.at:
                self._launch_again(running, running.due)
            return
        if _alive(running):
            return
        assert running.process is not None
        code = running.process.returncode
        how = f"was killed by signal {-code}" if code < 0 else f"ended with {code}"
        why = "" if code < 0 else self._why(running)  # of somebody else's signal its log knows nothing
        running.due = next_restart(running.ends, started=running.started, now=now)
        running.ends = running.due.times
        running.process = None
        self.say(
            f"etcd: {running.member.name} {how}{f': {why}' if why else ''}; "
            f"it is started again in {running.due.at - now:.1f} s"
        )

    def _launch_again(self, running: _Running, due: Restart) -> None:
        try:
            self._require_data([running.member])
            self._launch(running)
        except ConfigurationError as error:
            running.due = next_restart(due.times, started=due.at, now=self.clock.monotonic())
            running.ends = running.due.times
            self.say(f"{error}; it is tried again")

    def _launch(self, running: _Running) -> None:
        command = [str(self.binary), *arguments(self.cluster, running.member, self.folder, self.version)]
        try:
            if running.log.exists() and running.log.stat().st_size > MOST_LOG:
                running.log.replace(running.log.with_suffix(".log.1"))
            running.begins = running.log.stat().st_size if running.log.exists() else 0
            running.process = launch(command, running.log, own_group=True)
        except OSError as error:
            raise ConfigurationError(
                f"etcd: {running.member.name} cannot be started: {error.strerror} ({error.filename})"
            ) from error
        running.due = None
        running.started = self.clock.monotonic()

    def _why(self, running: _Running) -> str:
        try:
            with running.log.open("rb") as log:
                log.seek(max(running.begins, log.seek(0, os.SEEK_END) - MOST_READ))
                return reason(log.read(MOST_READ).decode(errors="replace"))
        except OSError as error:
            return f"its log cannot be read: {error.strerror}"

    def _client(self, running: _Running) -> EtcdClient:
        tls = client_tls(self.cluster, self.folder)
        return EtcdClient(f"{LOOPBACK}:{running.member.client_port}", tls=tls, timeout=1.0, budget=1.0)

    def _require_data(self, members: Sequence[ServerMember]) -> None:
        """Raise ConfigurationError for members that have served and have lost their data."""
        logs = {member.name: self.folder / member.name / "member" / "wal" for member in members}
        lost = [name for name, log in logs.items() if not any(log.glob("*.wal"))]
        if lost:
            others = ", of the others if they serve (elastic3d etcd backup)," if len(self.cluster.members) > 1 else ""
            raise ConfigurationError(
                f"etcd: the data of {', '.join(lost)} are not in {self.folder} any more, though it has served; started "
                f"empty it would forget what it has promised. Restore a backup{others} into another folder (elastic3d "
                "etcd restore), or make a new cluster in one"
            )


def _alive(running: _Running) -> bool:
    return running.process is not None and running.process.poll() is None


def _serves(client: EtcdClient) -> bool:
    try:
        return client.member_status().has_leader
    except EtcdError:
        return False


def _require_ports(member: ServerMember) -> None:
    address = LOOPBACK if member.host == LOOPBACK else ""
    for port in (member.client_port, member.peer_port):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((address, port))
            except OSError as error:
                raise ConfigurationError(
                    f"etcd: port {port} of {member.name} cannot be had ({error.strerror}): `ss -ltnp` says who has it; "
                    "stop that, or, for a new cluster, give others by --port"
                ) from error


@contextmanager
def only_one(folder: Path) -> Iterator[None]:
    """Hold a folder for this process; ConfigurationError if another one holds it."""
    try:
        number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise ConfigurationError(f"--data {folder}: {error.strerror}; give a folder") from error
    try:
        try:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigurationError(
                f"--data {folder}: another `elastic3d etcd` runs on it; stop that one, or give another folder"
            ) from error
        yield
    finally:
        os.close(number)

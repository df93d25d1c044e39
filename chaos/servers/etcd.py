"""Real etcd servers on this machine, for tests, the demo and fault injection: one node or a cluster.

Loopback only, data in a temporary directory that is removed at the end. Every server has a parent-death signal, so none
outlives its owner, however that dies. The signal fires when the *thread* that started the server ends: start
servers from a thread that lives as long as they shall.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import ssl
import subprocess
import tempfile
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from elastic3d.clock import SYSTEM
from elastic3d.errors import EtcdUnavailable
from elastic3d.etcd import EtcdClient
from elastic3d.etcd_server.binary import etcd_version, find_etcd
from elastic3d.etcd_server.certificates import COMMON_NAMES, Certificates
from elastic3d.etcd_server.process import free_ports, launch

START_TIMEOUT = 30.0
START_TRIES = 5


class EtcdMember:
    """One server process of a cluster."""

    def __init__(self, name: str, directory: Path) -> None:
        self.name = name
        self.directory = directory
        self.port = self.peer_port = 0
        self.arguments: list[str] = []
        self.scheme = "http"
        self.context: ssl.SSLContext | None = None
        self.stopped = False
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        """The client address, with its scheme."""
        return f"{self.scheme}://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """The process id; assertion unless it runs."""
        assert self._process is not None
        return self._process.pid

    @property
    def started(self) -> bool:
        """Whether it was started and not killed by us; it may have ended by itself."""
        return self._process is not None

    @property
    def alive(self) -> bool:
        """Whether the process runs, or is stopped."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start the process, on whatever data is there. Does not wait for it."""
        assert not self.alive
        # Ctrl-C reaches its owner, which needs it until it has undone what was done to the job.
        self._process = launch(self.arguments, self.log, own_group=True)

    def kill(self) -> None:
        """Kill it, as a power cut would, and reap it."""
        self.stopped = False
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def pause(self) -> None:
        """Stop it (SIGSTOP): connections stay open, nothing answers. Returns when every thread stands."""
        assert self.alive
        self.stopped = True
        os.kill(self.pid, signal.SIGSTOP)
        # Again, for it may have been woken by whoever lets it have a share of the time.
        while any(_state(task) not in "Tt" for task in Path(f"/proc/{self.pid}/task").iterdir()):
            SYSTEM.sleep(0.001)
            os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Resume it after `pause`."""
        assert self.alive
        self.stopped = False
        os.kill(self.pid, signal.SIGCONT)

    @property
    def log(self) -> Path:
        """What it prints."""
        return self.directory / f"{self.name}.log"

    def ask(self, path: str, body: dict[str, Any] | None = None, timeout: float = 5.0, token: str = "") -> Any:
        """Return the JSON that etcd's HTTP gateway answers; OSError if it does not."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Authorization": token} if token else {}
        request = urllib.request.Request(f"{self.endpoint}{path}", data=data, headers=headers)
        opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=self.context)
        )
        with opener.open(request, timeout=timeout) as answer:
            return json.load(answer)

    def healthy(self) -> bool:
        """Return whether it says that it has a leader and can serve, though it may be full."""
        try:
            return str(self.ask("/health", timeout=2.0)["health"]) == "true"
        except urllib.error.HTTPError as error:
            return b"NOSPACE" in error.read()
        except (OSError, ValueError):
            return False


class EtcdCluster:
    """`n` servers on this machine, up and healthy between enter and exit.

    binary: what to run; `find_etcd()` by default. password: enables authentication with the user root. tls: encrypts
    client connections; client_certificates: asks clients for theirs. quota: bytes of the database beyond which etcd
    takes no writes. also: another address of this machine to serve clients at. options: more for the server's command
    line. 3.5.0 to 3.5.2 can corrupt a member that is killed under load (etcd#13766): not for clusters whose members
    come back.
    """

    def __init__(
        self,
        n: int = 3,
        *,
        binary: str | Path | None = None,
        password: str | None = None,
        tls: bool = False,
        client_certificates: bool = False,
        quota: int | None = None,
        also: str = "",
        options: tuple[str, ...] = (),
    ) -> None:
        assert tls or not client_certificates
        self.binary = find_etcd(binary)
        self._also = also
        self.version = etcd_version(self.binary)
        self.password = password
        self.certificates: Certificates | None = None
        self.members: list[EtcdMember] = []
        self.expired = False
        self._n = n
        self._tls = tls
        self._client_certificates = client_certificates
        self._options = options
        self._quota = quota
        self._directory: Path | None = None

    def __enter__(self) -> Self:
        self._directory = Path(tempfile.mkdtemp(prefix="elastic3d-etcd-"))
        try:
            if self._tls:
                self.certificates = Certificates.make(self._directory, also=[self._also] if self._also else [])
            self.members = [EtcdMember(f"m{index}", self._directory) for index in range(self._n)]
            self._start()
            if self.password is not None:
                self._enable_auth(self.password)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Kill all members and remove their data."""
        for member in self.members:
            member.kill()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)

    @property
    def endpoints(self) -> tuple[str, ...]:
        """All client addresses, with their scheme."""
        return tuple(member.endpoint for member in self.members)

    @property
    def endpoint(self) -> str:
        """All client addresses in one text, as `--rdzv-endpoint` takes them."""
        return ",".join(f"127.0.0.1:{member.port}" for member in self.members)

    @property
    def serving(self) -> bool:
        """Whether all members run, none is stopped, and their certificate is not over."""
        return not self.expired and all(member.alive and not member.stopped for member in self.members)

    def expire(self) -> None:
        """Start all members anew, with a certificate that is over: nobody talks to them any more."""
        assert self.certificates is not None
        self.expired = True
        self.certificates.expire("server")
        for member in self.members:
            member.kill()
            member.start()

    def renew(self) -> None:
        """Give the members and their clients new certificates, and wait until all members serve."""
        assert self.certificates is not None
        for name in COMMON_NAMES:
            self.certificates.renew(name)
        self.wait_healthy()
        self.expired = False

    def client(self, **options: Any) -> EtcdClient:
        """Return a client that may do everything; `options` as EtcdClient takes them."""
        # Without a client certificate: etcd would take the name in it for the user.
        tls = None if self.certificates is None else self.certificates.tls(client=self._client_certificates)
        user = None if self.password is None else "root"
        return EtcdClient(self.endpoints, **{"user": user, "password": self.password, "tls": tls, **options})

    def ask(self, path: str, body: dict[str, Any], member: EtcdMember | None = None) -> Any:
        """Return the JSON that `member`, the first one by default, answers to root; OSError if it does not."""
        member = member or self.members[0]
        token = ""
        if self.password is not None:
            token = member.ask("/v3/auth/authenticate", {"name": "root", "password": self.password})["token"]
        return member.ask(path, body, token=token)

    def leader(self) -> EtcdMember:
        """Return the member that leads, as a living member sees it; EtcdUnavailable if there is none for long."""
        deadline = SYSTEM.monotonic() + START_TIMEOUT
        while SYSTEM.monotonic() < deadline:
            for member in self.members:
                try:
                    status = member.ask("/v3/maintenance/status", {}, timeout=1.0)
                except (OSError, ValueError):
                    continue
                if "leader" in status and status["leader"] == status["header"]["member_id"]:
                    return member
            SYSTEM.sleep(0.05)
        raise EtcdUnavailable("etcd: the cluster has no leader")

    def wait_healthy(self) -> None:
        """Return when every member that was not killed serves; EtcdUnavailable, with its log, if one does not."""
        deadline = SYSTEM.monotonic() + START_TIMEOUT
        for member in self.members:
            while member.started and not member.healthy():
                if not member.alive or SYSTEM.monotonic() >= deadline:
                    tail = member.log.read_text(errors="replace")[-2000:]
                    raise EtcdUnavailable(f"etcd: {self.binary} does not come up; the end of its log:\n{tail}")
                SYSTEM.sleep(0.02)

    def _start(self) -> None:
        for attempt in range(START_TRIES):
            ports = free_ports(2 * self._n)
            for member in self.members:
                member.port, member.peer_port = ports.pop(), ports.pop()
                member.scheme = "https" if self._tls else "http"
                member.context = self._context()
            peers = ",".join(f"{m.name}=http://127.0.0.1:{m.peer_port}" for m in self.members)
            for member in self.members:
                member.arguments = self._arguments(member, peers)
                member.start()
            try:
                self.wait_healthy()
                return
            except EtcdUnavailable as error:
                # Somebody took a port between our check and etcd's start.
                if "address already in use" not in str(error) or attempt == START_TRIES - 1:
                    raise
                for member in self.members:
                    member.kill()
                    shutil.rmtree(member.directory / member.name, ignore_errors=True)
                    member.log.unlink()

    def _arguments(self, member: EtcdMember, peers: str) -> list[str]:
        peer = f"http://127.0.0.1:{member.peer_port}"
        flags = {
            "name": member.name,
            "data-dir": str(member.directory / member.name),
            "listen-client-urls": ",".join(
                filter(None, (member.endpoint, self._also and f"{member.scheme}://{self._also}:{member.port}"))
            ),
            "advertise-client-urls": member.endpoint,
            "listen-peer-urls": peer,
            "initial-advertise-peer-urls": peer,
            "initial-cluster": peers,
            "initial-cluster-token": f"elastic3d-{self.members[0].peer_port}",
            "logger": "zap",
            "log-level": "warn",
            "bcrypt-cost": "4",
        }
        if self._n == 1:
            # Nobody to wait for: the only member elects itself at once.
            flags |= {"heartbeat-interval": "50", "election-timeout": "300"}
        if self._quota is not None:
            flags["quota-backend-bytes"] = str(self._quota)
        if self.version >= (3, 5):
            # A killed process loses nothing by it, only a killed machine.
            flags["unsafe-no-fsync"] = "true"
        if (3, 5, 0) <= self.version <= (3, 5, 2):
            flags["experimental-initial-corrupt-check"] = "true"
        if self.certificates is not None:
            files = self.certificates
            flags |= {"cert-file": str(files.server), "key-file": str(files.server_key)}
            if self._client_certificates:
                # An authority alone makes etcd ask for client certificates too.
                flags |= {"trusted-ca-file": str(files.ca), "client-cert-auth": "true"}
        return [str(self.binary), *(f"--{name}={value}" for name, value in flags.items()), *self._options]

    def _context(self) -> ssl.SSLContext | None:
        if self.certificates is None:
            return None
        context = ssl.create_default_context(cafile=str(self.certificates.ca))
        context.load_cert_chain(self.certificates.client, self.certificates.client_key)
        return context

    def _enable_auth(self, password: str) -> None:
        ask = self.members[0].ask
        ask("/v3/auth/user/add", {"name": "root", "password": password})
        ask("/v3/auth/role/add", {"name": "root"})
        ask("/v3/auth/user/grant", {"user": "root", "role": "root"})
        ask("/v3/auth/enable", {})


class EtcdServer(EtcdCluster):
    """A cluster of one, with the member's own verbs. Data survive `kill` and `restart`, not exit."""

    def __init__(
        self,
        *,
        binary: str | Path | None = None,
        password: str | None = None,
        tls: bool = False,
        client_certificates: bool = False,
        quota: int | None = None,
        also: str = "",
        options: tuple[str, ...] = (),
    ) -> None:
        super().__init__(
            1,
            binary=binary,
            password=password,
            tls=tls,
            client_certificates=client_certificates,
            quota=quota,
            also=also,
            options=options,
        )

    def kill(self) -> None:
        """Kill the server (SIGKILL)."""
        self.members[0].kill()

    def restart(self) -> None:
        """Kill the server if it runs, start it on the same data and ports, and wait until it serves."""
        self.kill()
        self.members[0].start()
        self.wait_healthy()

    def back_up(self) -> Path:
        """Kill the server, copy its data, start it again, and return where the copy is."""
        self.kill()
        copy = Path(tempfile.mkdtemp(prefix="backup-", dir=self.members[0].directory))
        shutil.copytree(self._data, copy, dirs_exist_ok=True)
        self.restart()
        return copy

    def restore(self, backup: Path | None) -> None:
        """Kill the server and start it, on the same ports, with the data of a backup; None: with no data at all."""
        self.kill()
        shutil.rmtree(self._data)
        if backup is not None:
            shutil.copytree(backup, self._data)
        self.restart()

    @property
    def _data(self) -> Path:
        return self.members[0].directory / self.members[0].name

    def pause(self) -> None:
        """Stop the server (SIGSTOP)."""
        self.members[0].pause()

    def resume(self) -> None:
        """Let the server go on."""
        self.members[0].resume()


def _state(task: Path) -> str:
    """Return the letter of a thread's state, T for stopped; also for one that has ended meanwhile."""
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "T"

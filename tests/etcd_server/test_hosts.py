"""`elastic3d etcd up --hosts` on three machines: network namespaces on one bridge, a command on each."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from chaos.machine.network import Network
from chaos.machine.processes import descendants, wait_until
from elastic3d.etcd import EtcdClient, Tls
from tests.etcd_server.test_up import ENVIRONMENT, PATIENCE, command, version

pytestmark = [pytest.mark.etcd, pytest.mark.netns, pytest.mark.timeout(300)]

HOSTS = ("e1", "e2", "e3")


class Machine:
    """One host of a network, with a folder of its own, where the command runs until it is killed."""

    def __init__(self, network: Network, host: str, folder: Path, tls: bool) -> None:
        self._within, self._address = network.within(host), network.address_of(host)
        self.hosts = ",".join(network.address_of(one) for one in HOSTS)
        self.data, self.log = folder / host, folder / f"{host}.log"
        self._tls = ["--tls"] if tls else []
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Run the command, as a person types it on this machine."""
        words = command("up", "--data", self.data, "--hosts", self.hosts, "--host", self._address, *self._tls)
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                [*self._within, *words, *version()], env=ENVIRONMENT, stdout=log, stderr=subprocess.STDOUT
            )

    def kill(self) -> None:
        """End the command and its member at once, as a machine ends that loses its power."""
        if self.process is not None:
            for pid in (self.process.pid, *descendants(self.process.pid)):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.process.wait()
            self.process = None


@contextmanager
def machines(folder: Path, *, tls: bool) -> Iterator[list[Machine]]:
    """Have three machines, on which nothing runs yet."""
    with Network() as network, ExitStack() as stack:
        for host in HOSTS:
            network.add(host)
        made = [Machine(network, host, folder, tls) for host in HOSTS]
        for machine in made:
            stack.callback(machine.kill)
        yield made


def logs(made: Sequence[Machine]) -> str:
    return "\n".join(machine.log.read_text() for machine in made if machine.log.exists())


@pytest.mark.parametrize("tls", [False, pytest.param(True, marks=pytest.mark.long)], ids=["plain", "tls"])
def test_a_command_on_each_of_three_machines_makes_one_cluster(tmp_path: Path, tls: bool) -> None:
    """Which serves while one of them is away, and has it back with what was written meanwhile."""
    with machines(tmp_path, tls=tls) as made:
        first = made[0]
        first.start()
        files = None
        if tls:
            there = first.data / "certificates"
            assert wait_until(lambda: (there / "client.pem").exists() and (there / "server.pem").exists(), PATIENCE), (
                logs(made)
            )
            for machine in made[1:]:
                # As the guide has it: all but the authority's own key.
                shutil.copytree(there, machine.data / "certificates", ignore=shutil.ignore_patterns("ca.key"))
            files = Tls.of(*(str(there / name) for name in ("ca.pem", "client.pem", "client.key")))
        for machine in made[1:]:
            machine.start()
        endpoint = ",".join(f"{address}:2379" for address in first.hosts.split(","))
        with EtcdClient(endpoint, tls=files) as client:
            client.put("/elastic3d/x", b"1", idempotent=True, budget=PATIENCE)
            made[1].kill()
            client.put("/elastic3d/x", b"2", idempotent=True, budget=PATIENCE)
            made[1].start()
            assert wait_until(lambda: healthy(files, endpoint) == 3, PATIENCE), logs(made)
            # Now it is needed: of the other two, one is gone.
            made[2].kill()
            client.put("/elastic3d/x", b"3", idempotent=True, budget=PATIENCE)
            item = client.get("/elastic3d/x")
            assert item is not None
            assert item.value == b"3"


def healthy(files: Tls | None, endpoint: str) -> int:
    """Return how many members lead or follow, as `elastic3d etcd status` has it."""
    options = [] if files is None else ["--ca", files.ca, "--cert", files.certificate, "--key", files.key]
    asked = command("status", "--endpoint", endpoint, *options, "--json")
    done = subprocess.run(asked, env=ENVIRONMENT, capture_output=True, text=True, timeout=PATIENCE, check=False)
    return sum(one["state"] in ("leads", "follows") for one in json.loads(done.stdout or '{"members": []}')["members"])

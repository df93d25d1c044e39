"""etcd's manifests, run: three real members with the StatefulSet's arguments, and the steps of the backup.

The certificates are made by the commands of the guide; names of pods become ports of this machine.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from chaos.machine.processes import wait_until
from elastic3d.errors import EtcdError
from elastic3d.etcd import EtcdClient, Tls
from elastic3d.etcd_server.binary import find_etcd
from elastic3d.etcd_server.process import free_ports
from tests.deploy.manifests import documents, pods
from tests.paths import ROOT

MEMBERS = ("etcd-0", "etcd-1", "etcd-2")
pytestmark = pytest.mark.etcd


def certificates(folder: Path) -> None:
    """Make ca.crt, tls.crt and tls.key as the guide says."""
    text = (ROOT / "docs" / "guides" / "kubernetes.md").read_text()
    block = re.search(r"\n\n((?:    .*\n)*    openssl x509 .*\n)", text)
    assert block is not None
    commands = re.sub("^    ", "", block[1], flags=re.MULTILINE)
    done = subprocess.run(["bash", "-euc", commands], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


class Machine:
    """The pods' names and paths, as this machine has them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        ports = iter(free_ports(3 * len(MEMBERS)))
        self.ports = {name: [next(ports), next(ports), next(ports)] for name in MEMBERS}

    def command(self, container: dict[str, list[str]], name: str) -> list[str]:
        """Return a container's command for the pod `name`."""
        program = find_etcd().parent / container["command"][0]
        return [str(program), *(self._here(word, name) for word in container["args"])]

    def _here(self, word: str, name: str) -> str:
        word = word.replace("$(POD_NAME)", name)
        for number, port in enumerate((2379, 2380, 2381)):
            for member, own in self.ports.items():
                word = word.replace(f"{member}.etcd.training.svc:{port}", f"127.0.0.1:{own[number]}")
            word = word.replace(f"0.0.0.0:{port}", f"127.0.0.1:{self.ports.get(name, [0] * 3)[number]}")
        word = word.replace("etcd-client.training.svc:2379", f"127.0.0.1:{self.ports['etcd-1'][0]}")
        for path in ("/etc/etcd/tls", "/backups", "/scratch"):
            word = word.replace(path, str(self.folder))
        return word.replace("/var/lib/etcd", str(self.folder / name))

    @contextmanager
    def members(self, container: dict[str, list[str]]) -> Iterator[None]:
        running = []
        try:
            for name in MEMBERS:
                with (self.folder / f"{name}.log").open("wb") as log:
                    running.append(subprocess.Popen(self.command(container, name), stdout=log, stderr=log))
            yield
        finally:
            for process in running:
                process.kill()
            for process in running:
                process.wait()


def healthy(port: int) -> bool:
    """Return whether a member says so where probes ask it."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return json.loads(answer.read()) == {"health": "true", "reason": ""}
    except OSError:
        return False


def test_three_members_serve_and_are_backed_up(tmp_path: Path) -> None:
    """Over TLS with a client's certificate, and without one to nobody; the backup is whole."""
    certificates(tmp_path)
    # The certificate has the names of pods, which lead nowhere here.
    extended = (tmp_path / "tls.ext").read_text().replace("subjectAltName=", "subjectAltName=IP:127.0.0.1,")
    (tmp_path / "tls.ext").write_text(extended)
    signed = (
        "openssl x509 -req -days 1 -in tls.csr -CA ca.crt -CAkey ca.key -CAcreateserial -extfile tls.ext -out tls.crt"
    )
    subprocess.run(signed.split(), cwd=tmp_path, capture_output=True, check=True)
    (stateful,) = documents("etcd/stateful-set.yaml")
    (backup,) = (one for one in documents("etcd/backup.yaml") if one["kind"] == "CronJob")
    machine = Machine(tmp_path)
    endpoints = ",".join(f"127.0.0.1:{ports[0]}" for ports in machine.ports.values())
    ca, cert, key = (str(tmp_path / name) for name in ("ca.crt", "tls.crt", "tls.key"))
    with machine.members(pods(stateful)[0]["spec"]["containers"][0]):
        with EtcdClient(endpoints, tls=Tls.of(ca, cert, key)) as client:
            client.check("/elastic3d/", budget=30.0)
            client.put("/elastic3d/x", b"1")
            assert client.get("/elastic3d/x") is not None
        assert wait_until(lambda: healthy(machine.ports["etcd-2"][2]), 30.0)
        with EtcdClient(endpoints, tls=Tls.of(ca, "", "")) as stranger, pytest.raises(EtcdError):
            stranger.check("/elastic3d/", budget=1.0)
        for step in pods(backup)[0]["spec"]["initContainers"]:
            done = subprocess.run(machine.command(step, "saved"), capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
        assert (tmp_path / "saved.db").stat().st_size > 0
        # A backup that lacks its end is noticed.
        (tmp_path / "half.db").write_bytes((tmp_path / "saved.db").read_bytes()[:-5000])
        shutil.rmtree(tmp_path / "restored")
        verify = pods(backup)[0]["spec"]["initContainers"][1]
        assert subprocess.run(machine.command(verify, "half"), capture_output=True, check=False).returncode != 0

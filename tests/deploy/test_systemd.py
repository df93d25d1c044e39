"""The units of systemd are read by systemd, start what they say, and give a node time to leave."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from elastic3d import environment
from elastic3d.cli.agent import LEFT
from elastic3d.etcd_server.binary import find_etcd
from elastic3d.quantities import parse_seconds
from tests.deploy.options import started
from tests.deploy.units import Unknown, command, read, variables
from tests.paths import ROOT

FOLDER = ROOT / "deploy" / "systemd"
UNITS = sorted((*FOLDER.glob("*.service"), *FOLDER.glob("*.timer")))


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_a_unit_has_no_key_that_systemd_would_ignore(path: Path) -> None:
    """By our own list of keys; systemd itself only warns of others."""
    unit = read(path.read_text())
    assert unit["Unit"]["Description"]
    for line in ("[Servce]", "TimeoutStopSecs=45", "NoNewPrivileges"):
        with pytest.raises(Unknown, match=re.escape(line)):
            read(f"{path.read_text()}{line}\n")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_finds_nothing_wrong(tmp_path: Path) -> None:
    """In the values too: with programs that are there, it says nothing; a wrong value it names."""

    def verify(change: tuple[str, str] | None = None) -> str:
        for path in UNITS:
            text = re.sub(r"/(?:opt|usr/local)/[\w./-]*bin/\w+", shutil.which("true") or "", path.read_text())
            (tmp_path / path.name).write_text(text.replace(*change) if change else text)
        paths = [str(tmp_path / path.name) for path in UNITS]
        done = subprocess.run(
            ["systemd-analyze", "verify", "--man=no", *paths], capture_output=True, text=True, check=False
        )
        return done.stdout + done.stderr

    assert verify() == ""
    assert "kill mode" in verify(("KillMode=mixed", "KillMode=mixd"))


def node() -> tuple[dict[str, list[str]], list[str]]:
    """Return the service of a node, and its command with the environment file beside it."""
    service = read((FOLDER / "elastic3d-node.service").read_text())["Service"]
    (line,) = service["ExecStart"]
    return service, command(line, variables(FOLDER / "node.env"))


def test_a_node_takes_the_options_that_it_is_given() -> None:
    """As torchrun and the rendezvous read them."""
    options = started(node()[1])
    assert (options.least, options.most, options.slots) == (2, 8, 8)
    assert options.settings.mode == "resident"
    assert options.script == ["train.py"]


def test_a_node_is_told_once_and_has_time_to_leave() -> None:
    """A second signal would make it leave at once; one that left in order, or whose job is over, stays down."""
    service, words = node()
    assert service["KillMode"] == ["mixed"]
    assert service["KillSignal"] == ["SIGTERM"]
    drain = parse_seconds(started(words).conf["drain"])
    assert drain is not None
    shutdown = float(environment.SHUTDOWN_TIMEOUT.default)
    assert drain + 2 <= shutdown <= float(service["TimeoutStopSec"][0]) - 5
    assert service["Restart"] == ["on-failure"]
    assert service["SuccessExitStatus"] == [str(LEFT)]


def test_hardening_leaves_a_node_what_it_needs() -> None:
    """GPUs, compilers of kernels, and the files by which a node is admitted."""
    service, _ = node()
    assert not {"PrivateDevices", "DevicePolicy", "MemoryDenyWriteExecute", "ProcSubset", "PrivateNetwork"} & set(
        service
    )
    assert service["OOMPolicy"] == ["continue"]
    assert service["NoNewPrivileges"] == ["yes"]
    assert {"AF_UNIX", "AF_INET", "AF_INET6"} <= set(service["RestrictAddressFamilies"][0].split())


def test_etcd_knows_every_variable_of_its_file() -> None:
    """etcd takes ETCD_NAME for --name; of one that it does not know it only warns."""
    asked = subprocess.run([str(find_etcd()), "--help"], capture_output=True, text=True, check=False)
    flags = set(re.findall(r"--([a-z0-9-]+)", asked.stdout + asked.stderr))
    known = {"ETCD_" + flag.upper().replace("-", "_") for flag in flags}
    given = variables(FOLDER / "etcd.env")
    assert given.keys() - known == set()
    assert "ETCD_NAMES" not in known
    members = dict(one.split("=", 1) for one in given["ETCD_INITIAL_CLUSTER"].split(","))
    assert members[given["ETCD_NAME"]] == given["ETCD_INITIAL_ADVERTISE_PEER_URLS"]
    clients = {f"{name}:2379" for name in members}
    assert clients == set(variables(FOLDER / "node.env")["ETCD"].split(","))


def test_etcds_arguments_in_the_cluster_are_etcds() -> None:
    """The flags of the StatefulSet, the same as those of the environment file."""
    text = (ROOT / "deploy" / "kubernetes" / "etcd" / "stateful-set.yaml").read_text()
    flags = re.findall(r"^ +- --([a-z-]+)", text, re.MULTILINE)
    names = {"ETCD_" + flag.upper().replace("-", "_") for flag in flags} - {"ETCD_LISTEN_METRICS_URLS"}
    assert names == set(variables(FOLDER / "etcd.env"))


def test_no_file_has_a_secret() -> None:
    """Only paths of files."""
    for path in FOLDER.iterdir():
        assert not re.search(r"(?i)(password|secret|token)=(?!etcd-for-jobs)\S", path.read_text()), path.name
        assert not os.access(path, os.X_OK), path.name

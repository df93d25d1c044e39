"""The command itself, as people give it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from chaos.machine.processes import free_port, wait_until
from chaos.servers.etcd import EtcdServer
from elastic3d.cli import application
from elastic3d.doctor import peers, store

APPLICATION = application()
DOCTOR = (sys.executable, "-c", "from elastic3d.cli import main; main()", "doctor")


def run(*arguments: str) -> tuple[int, str]:
    """Return a call's exit code and all that it printed."""
    result = CliRunner().invoke(APPLICATION, ["doctor", *arguments], env={"COLUMNS": "200"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        return getattr(result.exception, "exit_code", -1), str(result.exception)
    return result.exit_code, result.output


@pytest.fixture(scope="module")
def server() -> Iterator[EtcdServer]:
    with EtcdServer() as server:
        yield server


def test_wrong_calls_are_told_before_anything_is_looked_at(tmp_path: Path) -> None:
    """With exit code 2."""
    secret = tmp_path / "binary"
    secret.write_bytes(b"\xff\xfe")
    calls = [
        ("--limit", "0"),
        ("--limit", "never"),
        ("--limit", "5h"),
        ("--slots", "0"),
        ("--slots", "99999999999999999999"),
        ("--slots", "eight"),
        ("--store", "s3:bucket"),
        ("--store", "file://relative"),
        ("--register", "redis"),
        ("--peers", "host"),
        ("--peers", ","),
        ("--peers", ",".join(f"h{index}:1" for index in range(5000))),
        ("--endpoint", ",".join(f"h{index}:1" for index in range(5000))),
        ("--listen", "0"),
        ("--listen", "65536"),
        ("--endpoint", "e1:2379/path"),
        ("--endpoint", ",,"),
        ("--user", "root"),
        ("--endpoint", "e1", "--user", "root"),
        ("--endpoint", "e1", "--user", "root", "--password-file", "/no/such/file"),
        ("--endpoint", "e1", "--user", "root", "--password-file", str(secret)),
        ("--endpoint", "e1", "--ca", "/no/such/file"),
        ("--endpoint", "e1", "--ca", str(secret)),
        ("--endpoint", "e1", "--prefix", "a b"),
        ("nonsense",),
    ]
    assert [(call[:4], code) for call in calls if (code := run(*call)[0]) != 2] == []


@pytest.mark.etcd
@pytest.mark.long
def test_all_of_it(server: EtcdServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One document; a dead endpoint and interfaces that are not there make it a failure, and nothing is left.

    The node is one of its own peers, as where a scheduler starts the same command on all nodes.
    """
    monkeypatch.setattr(store, "SECONDS", 0.05)
    monkeypatch.setattr(peers, "SLOW", 60.0)  # of a connection: a busy machine is slow with any
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "\x1b[31mno such\n")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "^=,,")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "garbage")
    port = free_port()
    code, output = run(
        *("--json", "--endpoint", f"{server.endpoint},127.0.0.1:1", "--store", str(tmp_path / "new"), "--slots", "2"),
        *("--listen", str(port), "--peers", f"127.0.0.1:{port}"),
    )
    shown = json.loads(output[output.index("{") :])
    by_name = {one["name"]: one for one in shown["findings"]}
    assert (code, shown["schema"], shown["status"]) == (1, 1, "failure")
    assert shown["skipped"] == []
    assert by_name["http://127.0.0.1:1"]["status"] == "failure"
    assert by_name["GLOO_SOCKET_IFNAME"]["status"] == "failure"
    assert by_name[f"http://{server.endpoint}"]["status"] in ("ok", "warning")
    assert by_name[f"127.0.0.1:{port}"]["status"] == "ok"
    assert by_name["torch"]["status"] == "ok"
    assert {one["subject"] for one in shown["findings"]} == {
        *("device", "torch", "memory", "limits", "clock", "network", "etcd", "store", "peers")
    }
    assert all(bool(one["remedy"]) == (one["status"] != "ok") for one in shown["findings"])
    assert list(tmp_path.iterdir()) == []
    with server.client() as client:
        assert (client.range("")[0], client.leases()) == ((), ())


@pytest.mark.etcd
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_whoever_gives_up_leaves_nothing(server: EtcdServer, tmp_path: Path, number: signal.Signals) -> None:
    """By Ctrl-C or by SIGTERM, in the middle of the bandwidth: no key, no lease, no file, no process."""
    process = subprocess.Popen(
        [*DOCTOR, "--endpoint", server.endpoint, "--store", str(tmp_path)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # Ignored where the tests themselves were started in the background.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        assert wait_until(lambda: any(path.is_file() for path in tmp_path.rglob("*")), 60)
        process.send_signal(number)
        output, errors = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 128 + number, errors
    assert (output, b"left behind" in errors, b"Traceback" in errors) == (b"", False, False)
    assert list(tmp_path.iterdir()) == []
    with server.client() as client:
        assert (client.range("")[0], client.leases()) == ((), ())

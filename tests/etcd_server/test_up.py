"""`elastic3d etcd`, with real servers: up, a member killed, stopped, up again, backed up, and restored."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from chaos.machine.processes import wait_until
from elastic3d.etcd import EtcdClient, Tls
from elastic3d.etcd_server.binary import etcd_version, find_etcd, spell_version
from tests.paths import ROOT

pytestmark = pytest.mark.etcd
PATIENCE = 60.0
PROGRAM = "from elastic3d.cli import main; main()"


def command(*words: object) -> list[str]:
    return [sys.executable, "-c", PROGRAM, "etcd", *map(str, words)]


def version() -> list[str]:
    """Return the options that take the etcd of this machine, whatever it is known for."""
    binary = find_etcd()
    return ["--binary", str(binary), "--allow-version", spell_version(etcd_version(binary))]


ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("ELASTIC3D_")} | {
    "PYTHONPATH": str(ROOT),
    "ETCD_NAME": "somebody-elses",  # etcd would end for it, beside --name
}


def run(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*words), env=ENVIRONMENT, capture_output=True, text=True, timeout=PATIENCE, check=False
    )


def said(*words: object) -> dict[str, Any]:
    """Run a command that has to succeed, and return its document."""
    done = run(*words, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


@contextmanager
def up(data: Path, *words: object) -> Iterator[tuple[dict[str, Any], subprocess.Popen[str]]]:
    """Run an etcd until the end of the block, and yield what it said once it served."""
    with open(data.parent / "up.err", "a+") as errors:
        process = subprocess.Popen(
            command("up", "--data", data, *words, *version(), "--json"),
            env=ENVIRONMENT,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            # Whoever runs tests in the background has it ignored, and it would stay so.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            errors.seek(0)
            assert line, errors.read()
            yield json.loads(line), process
        finally:
            process.kill()
            process.wait()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_members_are_kept_running_and_leave_nothing(tmp_path: Path) -> None:
    """One that is killed is started again and told; data outlive a stop, and are in a backup and what is made of it."""
    data, copy, again = tmp_path / "data", tmp_path / "jobs.db", tmp_path / "again"
    with up(data, "--members", 3, "--tls") as (first, process):
        files = dict(part.split("=", 1) for part in first["conf"].split(",")[1:])
        with EtcdClient(first["endpoint"], tls=Tls.of(files["ca"], files["cert"], files["key"])) as client:
            client.put("/elastic3d/x", b"1", idempotent=True, budget=PATIENCE)
            victim = first["members"][1]["pid"]
            os.kill(victim, signal.SIGKILL)
            told = tmp_path / "up.err"
            assert wait_until(lambda: "m1 was killed by signal 9; it is started again" in told.read_text(), PATIENCE)
            # Two of three serve meanwhile.
            client.put("/elastic3d/x", b"2", idempotent=True, budget=PATIENCE)

            def all_there() -> bool:
                members = json.loads(run("status", "--data", data, "--json").stdout)["members"]
                return sorted(one["state"] for one in members) == ["follows", "follows", "leads"]

            assert wait_until(all_there, PATIENCE)
            facts = said("backup", copy, "--data", data)
            client.put("/elastic3d/x", b"3", idempotent=True, budget=PATIENCE)
        assert copy.stat().st_size == facts["size"]
        assert "another `elastic3d etcd` runs" in run("up", "--data", data, *version()).stderr
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0
        assert not any(alive(member["pid"]) for member in first["members"])

    with up(data) as (second, process):
        assert second["endpoint"] == first["endpoint"]
        with EtcdClient(second["endpoint"], tls=Tls.of(files["ca"], files["cert"], files["key"])) as client:
            item = client.get("/elastic3d/x", budget=PATIENCE)
        assert item is not None
        assert item.value == b"3"
        # Killed itself, it takes its members with it.
        process.kill()
        assert wait_until(lambda: not any(alive(member["pid"]) for member in second["members"]), PATIENCE)

    (tmp_path / "half.db").write_bytes(copy.read_bytes()[:-512])
    assert "no whole snapshot" in run("restore", tmp_path / "half.db", "--data", again, *version()).stderr
    assert not again.exists()
    made = said("restore", copy, "--data", again, "--members", 1, *version())
    assert "a cluster is there already" in run("restore", copy, "--data", again, *version()).stderr
    with up(again) as (third, process):
        assert third["endpoint"] == made["endpoint"]
        with EtcdClient(third["endpoint"]) as client:
            item = client.get("/elastic3d/x", budget=PATIENCE)
        assert item is not None
        assert item.value == b"2"
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again", "data", "half.db", "jobs.db", "up.err"]


def test_the_members_of_an_etcd_are_counted_not_its_endpoints(tmp_path: Path) -> None:
    """One endpoint of three, by two names: who does not answer is seen, and what that means for the rest."""
    with up(tmp_path / "data", "--members", 3) as (first, _process):
        pids = [member["pid"] for member in first["members"]]
        one: str = first["members"][0]["endpoint"]
        endpoint = f"{one},{one.replace('127.0.0.1', 'localhost')}"

        def status() -> dict[str, Any]:
            document: dict[str, Any] = json.loads(run("status", "--endpoint", endpoint, "--json").stdout)
            return document

        seen = status()
        assert sorted(member["state"] for member in seen["members"]) == ["follows", "follows", "leads"]
        assert (seen["serving"], [text for text in seen["warnings"] if "members" in text]) == (True, [])
        os.kill(pids[1], signal.SIGSTOP)
        assert wait_until(lambda: any("one more member" in text for text in status()["warnings"]), PATIENCE)
        seen = status()
        assert (seen["serving"], [member["state"] for member in seen["members"]].count("does not answer")) == (True, 1)
        os.kill(pids[2], signal.SIGSTOP)
        assert wait_until(lambda: not status()["serving"], PATIENCE)
        assert [member["state"] for member in status()["members"]].count("does not answer") == 2
        for pid in pids[1:]:
            os.kill(pid, signal.SIGCONT)


def test_a_port_that_is_taken_and_data_that_are_gone_are_named(tmp_path: Path) -> None:
    """And what to do; before a member is started on them, or on a folder that has none."""
    data = tmp_path / "data"
    with up(data, "--members", 1) as (first, _process):
        port = first["endpoint"].rpartition(":")[2]
        other = run("up", "--data", tmp_path / "other", "--members", 1, "--port", port, *version())
        assert other.returncode == 2
        assert f"port {port} of m0 cannot be had" in other.stderr
    for part in (data / "m0" / "member", data / "m0"):
        part.rename(tmp_path / f"{part.name}-taken-away")
        lost = run("up", "--data", data, *version())
        assert lost.returncode == 2
        assert "the data of m0 are not in" in lost.stderr


def test_a_member_whose_data_are_taken_away_while_it_runs_is_not_started_empty(tmp_path: Path) -> None:
    """It would come up as if there had never been a job; it goes on once they are back."""
    data, away = tmp_path / "data", tmp_path / "taken-away"
    with up(data, "--members", 1) as (first, _process), EtcdClient(first["endpoint"]) as client:
        client.put("/elastic3d/x", b"1", idempotent=True, budget=PATIENCE)
        (data / "m0").rename(away)
        os.kill(first["members"][0]["pid"], signal.SIGKILL)
        told = tmp_path / "up.err"
        assert wait_until(lambda: "the data of m0 are not in" in told.read_text(), PATIENCE)
        assert not (data / "m0").exists()
        away.rename(data / "m0")
        item = client.get("/elastic3d/x", budget=PATIENCE)
        assert item is not None
        assert item.value == b"1"


def test_a_cluster_with_certificates_is_started_again_without_openssl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host to which they were copied may not have the program: it is said, and the member serves."""
    data = tmp_path / "data"
    with up(data, "--members", 1, "--tls") as (first, process):
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0
    monkeypatch.setitem(ENVIRONMENT, "PATH", str(tmp_path / "nothing"))
    with up(data) as (again, process):
        assert again["endpoint"] == first["endpoint"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0
    assert "openssl program is not on PATH" in (tmp_path / "up.err").read_text()


def test_what_is_said_of_a_member_whose_data_are_gone_can_be_followed(tmp_path: Path) -> None:
    """A backup of the others, restored, has three members again, and what was written since that one ended."""
    data, copy, again = tmp_path / "data", tmp_path / "jobs.db", tmp_path / "again"
    advice = "Restore a backup, of the others if they serve (elastic3d etcd backup), into another folder"
    with up(data, "--members", 3) as (first, _process), EtcdClient(first["endpoint"]) as client:
        client.put("/elastic3d/x", b"1", idempotent=True, budget=PATIENCE)
        shutil.rmtree(data / "m1" / "member")
        os.kill(first["members"][1]["pid"], signal.SIGKILL)
        assert wait_until(lambda: advice in (tmp_path / "up.err").read_text(), PATIENCE)
        client.put("/elastic3d/x", b"2", idempotent=True, budget=PATIENCE)
        said("backup", copy, "--data", data)
    said("restore", copy, "--data", again, "--members", 3, *version())
    with up(again) as (second, _process), EtcdClient(second["endpoint"]) as client:
        item = client.get("/elastic3d/x", budget=PATIENCE)
        assert item is not None
        assert item.value == b"2"
        assert len(second["members"]) == 3

"""`elastic3d etcd` says what is wrong with a call before anything is made, and what it cannot reach."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from elastic3d.cli import application
from elastic3d.errors import Elastic3dError, UsageError
from elastic3d.etcd_server.binary import etcd_version, find_etcd, spell_version
from elastic3d.etcd_server.process import free_ports


def etcd(*words: object) -> Result:
    """Run the command."""
    return CliRunner().invoke(application(), ["etcd", *map(str, words)])


def allowed() -> list[str]:
    """Return the option that takes the etcd of this machine."""
    return ["--allow-version", spell_version(etcd_version(find_etcd()))]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--members", "0"], "--members 0"),
        (["--members", "9"], "--members 9"),
        (["--port", "70000"], "--port 70000"),
        (["--hosts", ","], "name the machines"),
        (["--hosts", "e1,e2"], "say which of e1, e2"),
        (["--host", "e1"], "name all of them"),
    ],
)
def test_a_wrong_call_makes_nothing(tmp_path: Path, words: list[str], why: str) -> None:
    """Of `up`: no folder, no process."""
    result = etcd("up", "--data", tmp_path / "data", *words, *allowed())
    assert isinstance(result.exception, UsageError)
    assert why in str(result.exception)
    assert not (tmp_path / "data").exists()


def test_a_folder_that_no_setting_could_name_is_refused(tmp_path: Path) -> None:
    """It is part of --rdzv-conf, which splits at commas."""
    for name in ("a b", "a,b", "a=b", "a\nb"):
        result = etcd("up", "--data", tmp_path / name, *allowed())
        assert isinstance(result.exception, UsageError)
        assert "without spaces, commas" in str(result.exception)


def test_an_etcd_that_is_away_is_said(tmp_path: Path) -> None:
    """By `status` with a document and exit code 1, by `backup` with an error and no file."""
    (port,) = free_ports(1)
    result = etcd("status", "--endpoint", f"127.0.0.1:{port}", "--json")
    assert result.exit_code == 1
    document = json.loads(result.stdout)
    assert (document["schema"], document["serving"]) == (1, False)
    assert document["members"][0]["state"] == "does not answer"
    result = etcd("backup", tmp_path / "jobs.db", "--endpoint", f"127.0.0.1:{port}")
    assert isinstance(result.exception, Elastic3dError)
    assert "no member gave its whole snapshot" in str(result.exception)
    assert [*tmp_path.iterdir()] == []


def test_a_folder_without_a_cluster_is_said(tmp_path: Path) -> None:
    """With the command that makes one."""
    result = etcd("status", "--data", tmp_path / "none")
    assert isinstance(result.exception, UsageError)
    assert "elastic3d etcd up --data" in str(result.exception)

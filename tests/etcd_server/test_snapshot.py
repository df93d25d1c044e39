"""A snapshot is there when it is whole, and a file that is not whole is never taken for one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from elastic3d.cli import application
from elastic3d.errors import ConfigurationError, EtcdUnavailable, UsageError
from elastic3d.etcd_server.snapshot import save, verify

DATABASE = bytes(range(256)) * 64
MEMBER = {"name": "m0", "host": "127.0.0.1", "client_port": 1, "peer_port": 2}
WHOLE = DATABASE + hashlib.sha256(DATABASE).digest()


def pieces(content: bytes, size: int = 1000) -> Iterator[bytes]:
    for at in range(0, len(content), size):
        yield content[at : at + size]


def test_a_whole_snapshot_is_kept(tmp_path: Path) -> None:
    """For its owner alone; its digest is that of the database, as etcd has it."""
    path = tmp_path / "jobs.db"
    facts = save(pieces(WHOLE), path)
    assert facts.digest == hashlib.sha256(DATABASE).hexdigest()
    assert facts.size == len(WHOLE) == path.stat().st_size
    assert verify(path) == facts
    assert path.stat().st_mode & 0o777 == 0o600
    assert [*tmp_path.iterdir()] == [path]


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "0 bytes only"),
        (WHOLE[:100], "100 bytes only"),
        (WHOLE[:-1], "does not end with a digest"),
        (DATABASE, "does not end with a digest"),
        (WHOLE[:-512], "not those of its digest"),
        (WHOLE[512:], "not those of its digest"),
        (WHOLE[:40] + b"\xff" + WHOLE[41:], "not those of its digest"),
        (WHOLE[:-1] + b"\x00", "not those of its digest"),
    ],
)
def test_half_a_snapshot_is_none(tmp_path: Path, content: bytes, why: str) -> None:
    """Neither as it comes, which leaves nothing behind, nor as a file that somebody has."""
    path = tmp_path / "jobs.db"
    with pytest.raises(EtcdUnavailable, match=why):
        save(pieces(content), path)
    assert [*tmp_path.iterdir()] == []
    path.write_bytes(content)
    with pytest.raises(UsageError, match=why):
        verify(path)


def test_what_breaks_off_leaves_what_was_there(tmp_path: Path) -> None:
    """By etcd, or by Ctrl-C; the file of before is as it was."""
    path = tmp_path / "jobs.db"
    path.write_bytes(b"of before")

    def broken(error: BaseException) -> Iterator[bytes]:
        yield WHOLE[:5000]
        raise error

    for error in (EtcdUnavailable("gone"), KeyboardInterrupt()):
        with pytest.raises(type(error)):
            save(broken(error), path, force=True)
        assert path.read_bytes() == b"of before"
        assert [*tmp_path.iterdir()] == [path]


def test_a_full_disk_is_said_and_leaves_nothing(tmp_path: Path) -> None:
    """As the kernel says it."""

    def full() -> Iterator[bytes]:
        yield WHOLE[:512]
        raise OSError(28, "No space left on device")

    with pytest.raises(ConfigurationError, match=r"No space left on device; nothing was kept"):
        save(full(), tmp_path / "jobs.db")
    assert [*tmp_path.iterdir()] == []


def test_nothing_is_overwritten_unasked(tmp_path: Path) -> None:
    """And a folder never."""
    path = tmp_path / "jobs.db"
    path.write_bytes(b"mine")
    with pytest.raises(UsageError, match="--force"):
        save(pieces(WHOLE), path)
    assert path.read_bytes() == b"mine"
    save(pieces(WHOLE), path, force=True)
    assert path.read_bytes() == WHOLE
    with pytest.raises(UsageError, match="there already"):
        save(pieces(WHOLE), tmp_path, force=True)
    with pytest.raises(UsageError, match="is no folder; make it first"):
        save(pieces(WHOLE), tmp_path / "not" / "jobs.db")
    with pytest.raises(UsageError, match="No such file"):
        verify(tmp_path / "not.db")


def test_a_restore_looks_before_it_begins(tmp_path: Path) -> None:
    """At the snapshot, and at the folder: what is there stays."""
    path, data = tmp_path / "jobs.db", tmp_path / "data"
    path.write_bytes(WHOLE[:-512])
    result = CliRunner().invoke(application(), ["etcd", "restore", str(path), "--data", str(data)])
    assert isinstance(result.exception, UsageError)
    assert "no whole snapshot" in str(result.exception)
    path.write_bytes(WHOLE)
    data.mkdir()
    (data / "cluster.json").write_text(
        json.dumps({"schema": 1, "token": "t", "members": [MEMBER], "tls": False, "here": "", "started": True})
    )
    command = ["etcd", "restore", str(path), "--data", str(data), "--allow-version", "3.5.1"]
    result = CliRunner().invoke(application(), command)
    assert isinstance(result.exception, UsageError | ConfigurationError)
    assert [file.name for file in data.iterdir()] == ["cluster.json"]

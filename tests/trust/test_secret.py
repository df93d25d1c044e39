"""The run's secret in etcd: written once, by whoever comes first."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from chaos.servers.etcd import EtcdServer
from chaos.servers.etcd_attacks import fill, make_space
from elastic3d import etcd_keys as keys
from elastic3d.clock import SystemClock
from elastic3d.errors import ConfigurationError
from elastic3d.etcd import EtcdClient, Impaired
from elastic3d.membership.driver.ended import make_room
from elastic3d.membership.inspection.keys import find
from elastic3d.membership.records import End, encode
from elastic3d.trust.credentials import SECRET_BYTES
from elastic3d.trust.secret import obtain
from elastic3d.values import Cause, Generation
from tests.clocks import HandClock


@pytest.fixture
def client() -> Iterator[EtcdClient]:
    """A client of an etcd of its own."""
    with EtcdServer() as server, EtcdClient(server.endpoint) as client:
        yield client


def test_each_run_has_one_secret_of_its_own(client: EtcdClient) -> None:
    """However many request it first. `status` neither shows it nor fails on it; garbage in its place is an error."""
    secrets: list[str] = []
    threads = [threading.Thread(target=lambda: secrets.append(obtain(client, "/e/one/"))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(secrets) == 6
    assert len(set(secrets)) == 1
    assert obtain(client, "/e/two/") != secrets[0]
    assert find("/e/one/", client.range("/e/one/")[0]).problems == []
    client.put("/e/one/board/secret", b"hunter2")
    with pytest.raises(ConfigurationError, match="holds no secret of a run") as caught:
        obtain(client, "/e/one/")
    assert "hunter2" not in str(caught.value)


def test_a_garbled_secret_of_a_live_job_is_waited_for(client: EtcdClient) -> None:
    """Its leader will write the secret again."""
    client.put("/e/one/board/secret", b"hunter2")
    client.put("/e/one/board/leader", b"somebody")
    mended = threading.Timer(0.5, lambda: client.put("/e/one/board/secret", b"5e" * 32))
    mended.start()
    assert obtain(client, "/e/one/") == "5e" * 32
    mended.join()


def test_a_node_that_starts_waits_for_an_etcd_that_takes_no_writes(capsys: pytest.CaptureFixture[str]) -> None:
    """There is space again a moment later: it is not lost for that, and says once what it waits for.

    For ever it does not wait, and says why; the same where it makes room for a job that begins anew.
    """
    with EtcdServer(quota=16 << 20) as server, server.client() as client:
        client.put("/e/two/" + keys.END, encode(End(failed=True, detail="it raised")))
        # Its last generation is rewritten; what only deletes a full etcd may take.
        client.put("/e/two/" + keys.GENERATION, encode(Generation(number=3, cause=Cause.START, nodes=())))
        fill(server)
        with pytest.raises(Impaired, match="etcdctl compact, defrag, alarm disarm"):
            obtain(client, "/e/one/", clock=Hasty())
        with pytest.raises(Impaired, match="etcdctl compact, defrag, alarm disarm"):
            make_room(client, "/e/two/", 1.0, Hasty())
        capsys.readouterr()
        assert make_room(client, "/e/two/", 1.0, Mended(server)) is None
        assert client.get("/e/two/" + keys.END) is None
        assert capsys.readouterr().err.count("alarm disarm); trying for 30 s more") == 1
        assert len(obtain(client, "/e/one/")) == 2 * SECRET_BYTES


class Mended(SystemClock):
    """A clock on which there is space again after the first sleep."""

    def __init__(self, server: EtcdServer) -> None:
        self.full: EtcdServer | None = server

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        if self.full is not None:
            make_space(self.full)
            self.full = None


class Hasty(HandClock):
    """A clock on which sleeping takes a minute, and no time."""

    def sleep(self, seconds: float) -> None:
        self.now += 60.0

"""An etcd of our own comes back whatever was done to it before."""

from __future__ import annotations

import pytest

from chaos.servers.etcd import EtcdServer
from chaos.servers.etcd_attacks import CHUNK, alarms, fill, make_space
from elastic3d.errors import EtcdError, EtcdUnavailable

pytestmark = pytest.mark.etcd


def test_a_full_etcd_that_is_restarted_is_up() -> None:
    """It serves, though it takes no writes until there is space: nobody waits for what comes after that."""
    with EtcdServer(quota=16 << 20) as etcd:
        fill(etcd)
        etcd.restart()
        assert alarms(etcd)
        with etcd.client() as client:
            with pytest.raises(EtcdError):
                client.put("a", b"1")
            make_space(etcd)
            client.put("a", b"1")


def test_space_that_cannot_be_made_is_not_waited_for() -> None:
    """Where the data that fill it are none of a neighbour, say."""
    with EtcdServer() as etcd, EtcdServer(quota=16 << 20) as small:
        with etcd.client() as client:
            # More than the other may have, whatever a busy machine lets it take beyond its quota.
            for number in range(2 * (16 << 20) // CHUNK):
                client.put(f"/of the job/{number}", b"x" * CHUNK, idempotent=True)
        small.restore(etcd.back_up())
        with small.client() as client, pytest.raises(EtcdError):
            client.put("/one/more", b"x")
        assert alarms(small)
        with pytest.raises(EtcdUnavailable, match="takes no writes"):
            make_space(small, patience=0.5)


def test_nobody_talks_to_an_etcd_whose_certificate_is_over() -> None:
    """It does not count as serving until there are new ones, with which it has its data."""
    with EtcdServer(tls=True, client_certificates=True) as etcd:
        with etcd.client() as client:
            client.put("a", b"1")
        etcd.expire()
        assert not etcd.serving
        with pytest.raises(EtcdError), etcd.client(timeout=1.0) as client:
            client.get("a")
        etcd.renew()
        assert etcd.serving
        with etcd.client() as client:
            item = client.get("a")
        assert item is not None
        assert item.value == b"1"

"""An etcd whose database is nearly full is reported before it is full."""

from __future__ import annotations

import pytest

from chaos.machine.processes import wait_until
from chaos.servers.etcd import EtcdServer
from elastic3d.etcd import EtcdClient
from elastic3d.membership.inspection.database import LARGE, fullness


def test_a_large_database_is_reported() -> None:
    """From half of the default quota on, with what to do; not while there is space."""
    assert fullness(LARGE - 1) == []
    (said,) = fullness(3 * LARGE // 2)
    assert "1.5 GiB" in said
    assert "defrag" in said


@pytest.mark.etcd
def test_etcd_reports_the_size_of_its_database() -> None:
    """Writes make it larger."""
    with EtcdServer() as server, EtcdClient(server.endpoint) as client:
        before = client.database_size()
        for number in range(4):
            client.put(str(number), bytes(1_000_000), idempotent=True, budget=20.0)
        # etcd tells the size of its file, which it writes a moment after it has answered.
        assert wait_until(lambda: client.database_size() >= before + 4_000_000, 30)

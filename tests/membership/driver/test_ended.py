"""Making room for the next job under an id, over a real etcd."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from chaos.servers.etcd import EtcdServer
from elastic3d import etcd_keys as keys
from elastic3d.clock import SYSTEM
from elastic3d.membership.driver.ended import make_room
from elastic3d.membership.records import End, encode

pytestmark = pytest.mark.etcd

ROOT = "/e/begun-again/"


def test_an_etcd_that_stands_still_as_room_is_made_costs_no_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """For longer than one try may take, between the last read and the write: the write is sent again."""
    with EtcdServer() as server, server.client() as client:
        client.put(ROOT + keys.END, encode(End(failed=True, detail="it raised")))
        read = client.range

        def last_read(*given: Any, **named: Any) -> Any:
            answer = read(*given, **named)
            server.pause()
            threading.Timer(1.5, server.resume).start()
            return answer

        monkeypatch.setattr(client, "range", last_read)
        assert make_room(client, ROOT, 1.0, SYSTEM) is None
        assert client.get(ROOT + keys.END) is None

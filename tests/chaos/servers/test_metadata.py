"""The runtime's own watcher understands the metadata servers of the chaos tool."""

from __future__ import annotations

import queue
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import pytest

from chaos.servers.metadata import Provider, cloud_of
from elastic3d.etcd_server.process import PORTS
from elastic3d.notices import CloudNotice, watch
from elastic3d.notices.options import Choice, NoticeOptions

NOTICES = {Provider.GCP: (30.0, "preempt"), Provider.AWS: (120.0, "terminate"), Provider.AZURE: (30.0, "preempt")}


def test_a_server_listens_where_nodes_reach_it() -> None:
    """At another address of this machine than that of the loopback device, for nodes that are hosts of their own."""
    with cloud_of(Provider.GCP, "127.0.0.2") as server:
        assert server.url.startswith("http://127.0.0.2:")
        request = Request(f"{server.url}/computeMetadata/v1/instance/preempted", headers={"Metadata-Flavor": "Google"})
        with urlopen(request, timeout=30) as reply:
            assert reply.read() == b"FALSE"


def test_a_server_that_is_stopped_can_come_back_to_its_port() -> None:
    """The system gives it to nobody meanwhile."""
    with cloud_of(Provider.AWS) as server:
        assert urlsplit(server.url).port in PORTS


@pytest.mark.parametrize("provider", Provider)
@pytest.mark.parametrize("asked", [True, False], ids=["named", "auto"])
def test_a_preemption_is_noticed(provider: Provider, asked: bool) -> None:
    """By whoever was told which cloud it is, and by who finds out."""
    heard: queue.SimpleQueue[CloudNotice] = queue.SimpleQueue()
    choice = Choice(str(provider)) if asked else Choice.AUTO
    with cloud_of(provider) as server:
        watcher = watch(NoticeOptions(choice=choice, url=server.url), heard.put)
        assert watcher is not None
        try:
            server.preempt()
            notice = heard.get(timeout=30)
        finally:
            watcher.close()
    seconds, action = NOTICES[provider]
    assert (str(notice.kind), notice.action) == (str(provider), action)
    assert notice.seconds is not None
    assert 0 < notice.seconds <= seconds

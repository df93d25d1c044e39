"""The runtime's own watcher understands the metadata server of the chaos tool."""

from __future__ import annotations

import queue

from chaos.servers.metadata import MetadataServer
from elastic3d.notices import CloudNotice, NoticeKind, watch
from elastic3d.notices.options import Choice, NoticeOptions


def test_a_preemption_is_noticed_at_once() -> None:
    """The watcher waits on the value and sees it change."""
    heard: queue.SimpleQueue[CloudNotice] = queue.SimpleQueue()
    with MetadataServer() as server:
        watcher = watch(NoticeOptions(choice=Choice.AUTO, url=server.url), heard.put)
        assert watcher is not None
        try:
            server.preempt()
            notice = heard.get(timeout=10)
        finally:
            watcher.close()
    assert (notice.kind, notice.seconds, notice.action) == (NoticeKind.GCP, 30.0, "preempt")

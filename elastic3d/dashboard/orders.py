"""Orders that a browser gives: those of `elastic3d drain`, `quarantine` and `release`."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from elastic3d.cli.durations import spell
from elastic3d.errors import UsageError
from elastic3d.etcd import EtcdClient
from elastic3d.membership.inspection.jobs import Job
from elastic3d.membership.orders import order_drain, order_quarantine, release
from elastic3d.quantities import some_seconds

LONGEST_REASON = 500
DEADLINE, KEPT_OUT = "5m", "10m"


class OrderDesk:
    """Carries out orders about one job, one at a time. by: who gives them, for people."""

    def __init__(self, client: EtcdClient, job: Job, by: str) -> None:
        self._client, self._job, self._by = client, job, by
        self._lock = threading.Lock()

    def give(self, wish: Mapping[str, Any]) -> str:
        """Carry out an order {"order", "node", "for", "reason"}; return what was done, in words.

        UsageError for what makes no sense, with nothing changed; the errors of etcd otherwise.
        """
        order, node = _text(wish, "order"), _text(wish, "node")
        duration, reason = _text(wish, "for"), _text(wish, "reason")
        if not node:
            raise UsageError("an order is about a node: give its name")
        if len(reason) > LONGEST_REASON:
            raise UsageError(f"give a reason of at most {LONGEST_REASON} characters")
        with self._lock:
            match order:
                case "drain":
                    seconds = some_seconds(duration or DEADLINE, "the deadline")
                    order_drain(self._client, self._job.root, node, seconds=seconds, by=self._by, reason=reason)
                    return f"node {node} leaves within {spell(seconds)}"
                case "quarantine":
                    seconds = some_seconds(duration or KEPT_OUT, "the time")
                    root = self._job.root
                    machine = order_quarantine(self._client, root, node, seconds=seconds, by=self._by, reason=reason)
                    return f"machine {machine} is kept out for {spell(seconds)}"
                case "release":
                    done = release(self._client, self._job.root, node)
                    return f"taken back: {', '.join(done)}"
        raise UsageError(f"{order!r} is no order: give drain, quarantine or release")


def _text(wish: Mapping[str, Any], name: str) -> str:
    value = wish.get(name, "")
    if not isinstance(value, str):
        raise UsageError(f"an order's {name!r} is text")
    return value.strip()

"""The leader's account of where the time of the nodes goes, in etcd: taken over, and written now and then.

A new leader reads what the one before it left, once it has the lead: nothing that is fenced on an older token can be
written after that. What is in the record is not known here.

A leader that does not train hears of no step. It reads now and then what the node of rank 0 writes for people.
"""

from __future__ import annotations

from typing import Protocol

from elastic3d import etcd_keys as keys
from elastic3d.errors import EtcdError
from elastic3d.etcd import EtcdClient
from elastic3d.membership import transactions

BUDGET = 2.0
"""Seconds for one try, over all endpoints."""


class GoodputKeeping(Protocol):
    """Who keeps the account; nothing of it may block. Called on the writer's thread."""

    def resume(self, value: bytes | None) -> None:
        """Go on from what the leader before this one left, None for nothing."""

    def due(self, *, last: bool) -> bytes | None:
        """Return what to write now, None for nothing. last: this is the last time."""

    def asks(self) -> str:
        """Return the id of the member that is to be asked how far the trainers are, "" for none."""

    def told(self, value: bytes) -> None:
        """Take that member's pulse."""

    def resign(self) -> None:
        """Take note that this member no longer leads."""

    def wrote(self) -> None:
        """Take note that it was written."""


class GoodputWriter:
    """Reads and writes the record of the job under `root`. Not thread-safe."""

    def __init__(self, client: EtcdClient, root: str, keeping: GoodputKeeping) -> None:
        self._client, self._root, self._keeping = client, root, keeping
        self._token = 0

    def look(self, token: int, *, last: bool = False) -> None:
        """Do what is due of a leader of this token, 0 for a member that does not lead. The next look tries again."""
        if not token:
            if self._token:
                self._token = 0
                self._keeping.resign()
            return
        try:
            if token != self._token:
                item = self._client.get(self._root + keys.GOODPUT, budget=BUDGET)
                self._keeping.resume(None if item is None else item.value)
                self._token = token
            trains = self._keeping.asks()
            if trains:
                item = self._client.get(self._root + keys.pulse(trains), budget=BUDGET)
                if item is not None:
                    self._keeping.told(item.value)
            value = self._keeping.due(last=last)
            if value is None:
                return
            made = transactions.goodput(self._root, token, value)
            if self._client.txn(made.conditions, made.operations, idempotent=True, budget=BUDGET).succeeded:
                self._keeping.wrote()
        except EtcdError:
            return  # the watch reports an etcd that is away, and the pulse one that takes no writes

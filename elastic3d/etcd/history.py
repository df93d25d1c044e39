"""Whether etcd still has the history that a watch has delivered.

An etcd that comes back with empty data, or from a backup, counts its revisions on from there. A watch that resumes
after revision 105 at a server that is at 12 would hear nothing until 106, and then a part of another history. The
cluster's id alone does not show that, since it is made of names, addresses and a token that may all be the same; nor
does the revision alone, since others may have written beyond it again. So a watch that resumes asks for the newest
change it knows, as of that change's revision.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from elastic3d.etcd import messages, transport
from elastic3d.etcd.codec import Codec
from elastic3d.etcd.failures import Compacted, FutureRevision
from elastic3d.etcd.operations import KeyValue
from elastic3d.etcd.session import Session


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One key was written, or deleted if `kv` is None, at `revision`."""

    key: str
    kv: KeyValue | None
    revision: int


class DeliveredRevisions:
    """What was delivered of the keys under `prefix`: up to which revision, of which cluster, and its newest change."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._cluster = 0
        self._revision = 0
        self._newest: Change | None = None

    def listed(self, cluster: int, kvs: Sequence[KeyValue], revision: int) -> None:
        """Take note of a listing; `cluster` is the id that its header names."""
        newest = max(kvs, key=lambda kv: kv.mod_revision, default=None)
        self._cluster, self._revision = cluster, revision
        self._newest = None if newest is None else Change(key=newest.key, kv=newest, revision=newest.mod_revision)

    def changed(self, changes: Sequence[Change]) -> None:
        """Take note of changes that were delivered, in their order."""
        for change in changes:
            self._revision = max(self._revision, change.revision)
            # A key that is there proves more than a deleted one, which is not in an empty store either.
            if change.kv is not None or self._newest is None or self._newest.key == change.key:
                self._newest = change

    def continues(self, header: Any) -> bool:
        """Return whether this header is from the same cluster and not older, as a lagging member's may be."""
        return bool(header.cluster_id == self._cluster and header.revision >= self._revision)

    def contradicts(self, cluster: int, kvs: Sequence[KeyValue], revision: int) -> bool:
        """Return whether a listing cannot be of the same history: nothing that was delivered is ever undone."""
        if not self._cluster:
            return False
        if cluster != self._cluster or revision < self._revision:
            return True
        newest = self._newest
        return newest is not None and any(kv.key == newest.key and kv.mod_revision < newest.revision for kv in kvs)

    def kept_by(self, session: Session, codec: Codec, *, budget: float) -> bool:
        """Ask etcd, by a linearizable read, whether the newest change is in its history as it was delivered.

        True if etcd has compacted it away: making the watch will say so, and then `contradicts` judges the listing.
        EtcdUnavailable after `budget` seconds without an answer.
        """
        newest = self._newest
        key = codec.key(newest.key if newest is not None else self._prefix)
        request = messages.new("RangeRequest", key=key, revision=self._revision, keys_only=True)
        try:
            answer = session.call(transport.RANGE, request, safe=True, budget=budget)
        except FutureRevision:
            return False
        except Compacted:
            return True
        if answer.header.cluster_id != self._cluster:
            return False
        if newest is None:
            return True
        marks = [_mark(codec.key_value(kv)) for kv in answer.kvs]
        return marks == ([] if newest.kv is None else [_mark(newest.kv)])


def _mark(kv: KeyValue) -> tuple[int, int, int, int]:
    return kv.create_revision, kv.mod_revision, kv.version, kv.lease

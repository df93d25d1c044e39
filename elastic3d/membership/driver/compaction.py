"""The leader has etcd discard old versions of its keys, so that its database stays small.

etcd keeps every version of every key until somebody compacts it, and out of the box nobody does. Each pulse is a
version: at its default quota of 2 GiB etcd would take no more writes after 65 hours of a job of 100 nodes, 13 hours of
500. Watches that were cut off for longer list anew when they are made again. Current values are never touched.
"""

from __future__ import annotations

from collections import deque

KEPT = 900.0
"""Seconds of history that are kept, for watches of this job and of others that are cut off for a while."""

EVERY = 300.0
"""Seconds between two compactions."""


class Compaction:
    """Decides which revision to compact to, and when. Not thread-safe; times are monotonic seconds."""

    def __init__(self, *, kept: float = KEPT, every: float = EVERY) -> None:
        self._kept, self._every = kept, every
        self._seen: deque[tuple[float, int]] = deque()
        self._past = 0
        self._next = 0.0

    def saw(self, revision: int, now: float) -> None:
        """Take note that etcd was at `revision` at `now`; a lower one than before means that etcd was rolled back."""
        if self._seen and revision < self._seen[-1][1]:
            self._seen.clear()
            self._past = 0
        self._seen.append((now, revision))
        while self._seen and self._seen[0][0] <= now - self._kept:
            self._past = self._seen.popleft()[1]

    def due(self, now: float) -> int:
        """Return the revision to compact to now, 0 for none; each is returned once."""
        if not self._past or now < self._next:
            return 0
        self._next = now + self._every
        past, self._past = self._past, 0
        return past

"""The newest view of a job and how it came to be, for any number of browsers: one writer, no queues.

Each browser says which version it has and is given the differences since, or, if these are no longer there, everything.
What waits for a browser that does not read is therefore nothing at all.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections import deque
from dataclasses import dataclass
from typing import Any

from elastic3d.dashboard.differences import difference

KEPT = 16
"""Differences that are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulled:
    """What a browser is sent: one server-sent event, and the version that it has then."""

    version: int
    message: bytes


class ViewFeed:
    """Written by one thread with `publish` and `read`; read on the event loop's thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._version = 0
        self._view: dict[str, Any] = {}
        self._whole: tuple[int, bytes] = (0, b"")
        self._differences: deque[tuple[int, bytes]] = deque(maxlen=KEPT)
        self._read_at = 0.0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changed = asyncio.Event()
        self.closed = False
        self.watching = 0
        """Browsers that follow it."""

    def publish(self, view: dict[str, Any], read_at: float) -> bool:
        """Take a view, which shows what etcd had at `read_at`; return whether it differs from the one before."""
        with self._lock:
            self._read_at = read_at
            patch = difference(self._view, view)
            if not patch:
                return False
            if self._version:
                self._differences.append((self._version + 1, event("change", patch, read_at)))
            self._version, self._view = self._version + 1, view
        self._wake()
        return True

    def view(self) -> tuple[int, dict[str, Any], float]:
        """Return the newest view with its version, and when etcd last answered."""
        with self._lock:
            return self._version, self._view, self._read_at

    def since(self, version: int) -> Pulled | None:
        """Return what a browser that has `version` (0 for nothing) is sent next, None if it has all."""
        with self._lock:
            if version == self._version:
                return None
            for number, message in self._differences:
                if number == version + 1:
                    return Pulled(version=number, message=message)
            if self._whole[0] != self._version:
                self._whole = (self._version, event("whole", self._view, self._read_at))
            return Pulled(version=self._version, message=self._whole[1])

    def alive(self) -> bytes:
        """Return the event which says that nothing has changed, and when etcd last answered."""
        with self._lock:
            return event("alive", {}, self._read_at)

    # On the loop's thread.

    def attach(self) -> None:
        """Have `publish` wake those that wait on the running loop."""
        self._loop = asyncio.get_running_loop()

    def next_change(self) -> asyncio.Event:
        """Return what is set with the next change, or when the feed is closed."""
        return self._changed

    def close(self) -> None:
        """End all streams; may be called from a signal handler."""
        self.closed = True
        self._wake()

    def _wake(self) -> None:
        if self._loop is not None:
            try:
                self._loop.call_soon_threadsafe(self._set)
            except RuntimeError:
                return  # the loop is over

    def _set(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


def event(kind: str, data: dict[str, Any], read_at: float) -> bytes:
    """Return one server-sent event (https://html.spec.whatwg.org/multipage/server-sent-events.html)."""
    body = json.dumps({"read_at": round(read_at, 1), "data": data}, separators=(",", ":"), allow_nan=False)
    return f"event: {kind}\ndata: {body}\n\n".encode()

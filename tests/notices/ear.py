"""A listener that records what a watcher reports."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from elastic3d.notices import CloudNotice, Watcher
from elastic3d.notices.source import NoticeSource


class Ear:
    """Records given and withdrawn notices, in order."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.given: list[CloudNotice] = []
        self.withdrawn: list[CloudNotice] = []

    def tell(self, notice: CloudNotice) -> None:
        with self._changed:
            self.given.append(notice)
            self._changed.notify_all()

    def withdraw(self, notice: CloudNotice) -> None:
        with self._changed:
            self.withdrawn.append(notice)
            self._changed.notify_all()

    def hears(self, given: int = 1, withdrawn: int = 0) -> bool:
        """Wait until so many notices were given and withdrawn; return whether they were."""
        with self._changed:
            return self._changed.wait_for(lambda: len(self.given) >= given and len(self.withdrawn) >= withdrawn, 5)


@contextmanager
def listening(sources: Sequence[NoticeSource], *, rebalance: bool = False) -> Iterator[tuple[Watcher, Ear]]:
    """Listen to `sources` for the length of a with block."""
    ear = Ear()
    watcher = Watcher(sources, ear.tell, withdrawn=ear.withdraw, rebalance=rebalance)
    try:
        yield watcher, ear
    finally:
        watcher.close()

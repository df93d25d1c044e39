"""Announces readers and writers in the store for as long as they work (format.md, section 13).

Most reads and saves are over within seconds, and the grace of a collection is longer: they are not worth an object.
Longer ones announce themselves, and renew the announcement until they are done. That of a dead process expires.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Thread

from checkpointing.errors import CheckpointError, FormatError, NoCheckpoint, StoreDenied, StoreError, StoreNotFound
from checkpointing.format import names
from checkpointing.format.announcement import (
    ANNOUNCED_AFTER,
    EXPIRES,
    Announcement,
    AtWork,
    Role,
    at_work,
    decode_announcement,
    encode_announcement,
)
from checkpointing.reading.naming import committed, read_versioned
from checkpointing.reading.reader import Checkpoint, open_checkpoint
from checkpointing.stores.protocol import Store

RENEWED_EVERY = 60.0
MARGIN = 60.0
"""Seconds until the store gives a write its time, at most, and by which a store's clocks may differ."""

_WRITES = 3
_GOODBYE = 5.0  # seconds that a write of the announcement has to end after the work
_TRIES = 8


class Announced:
    """One reader's or writer's announcement. Its thread never raises: a reader may not be able to write to the store.

    checkpoint: the one that is read or built on. clock: seconds of this process, of which only differences count.
    """

    def __init__(
        self, store: Store, role: Role, checkpoint: str | None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store, self._role, self._checkpoint, self._clock = store, role, checkpoint, clock
        self._began = clock()
        self._name = names.announcement(secrets.token_hex(16))
        self._asked = False
        self._over = threading.Event()
        self._thread: Thread | None = None

    def renew(self) -> bool:
        """Write the announcement; return whether it is in the store."""
        self._asked = True
        for _ in range(_WRITES):
            sent = self._clock()
            announcement = Announcement(role=self._role, checkpoint=self._checkpoint, began=sent - self._began + MARGIN)
            try:
                self._store.put(self._name, encode_announcement(announcement))
            except (CheckpointError, OSError):
                return False  # such as for a reader who may not write, and has only the grace
            if self._clock() - sent <= MARGIN:
                return True
            # The write took so long that the work looks younger than it is.
        return False

    def keep(self, after: float) -> None:
        """Announce the work after `after` seconds, until `end`."""
        self._thread = Thread(target=self._renewing, args=(after,), name="announce", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Delete the announcement."""
        self._over.set()
        if self._thread is not None:
            self._thread.join(timeout=_GOODBYE)
        if self._asked:
            with contextlib.suppress(CheckpointError, OSError):
                self._store.delete(self._name)  # else it expires

    def _renewing(self, after: float) -> None:
        while not self._over.wait(after):
            self.renew()
            after = RENEWED_EVERY


@contextmanager
def announced(
    store: Store, role: Role, checkpoint: str | None, *, after: float = ANNOUNCED_AFTER
) -> Iterator[Announced]:
    """Announce the work in the block to collections once it has taken `after` seconds; 0: before it begins."""
    own = Announced(store, role, checkpoint)
    if after <= 0:
        own.renew()
    own.keep(after if after > 0 else RENEWED_EVERY)
    try:
        yield own
    finally:
        own.end()


@contextmanager
def reading(store: Store, name: str = "latest", *, after: float = ANNOUNCED_AFTER) -> Iterator[Checkpoint]:
    """Open a checkpoint, and keep collections from it while the block reads.

    name: anything that `resolve_name` takes. With `after` 0 no collection takes it, however short its grace: it is
    checked to be still committed after it was announced. Errors are those of `open_checkpoint`.
    """
    for _ in range(_TRIES):
        checkpoint = open_checkpoint(store, name)
        with announced(store, Role.READER, checkpoint.name, after=after):
            if after <= 0 and checkpoint.name not in committed(store, read_versioned(store)[0]):
                continue  # a collection dropped it meanwhile
            yield checkpoint
            return
    raise NoCheckpoint(f"store {store.url}: what {name} means was collected {_TRIES} times while it was opened")


def announced_in(store: Store, now: float) -> AtWork:
    """Return the readers and writers in a store at `now`, by its clock.

    StoreDenied for an announcement that may not be read and was written lately.
    """
    announcements: list[tuple[float, Announcement | FormatError]] = []
    for entry in list(store.entries(names.ANNOUNCEMENTS)):
        if not names.is_announcement(entry.name):
            continue
        try:
            announcements.append((entry.modified, decode_announcement(store.get(entry.name), entry.name)))
        except StoreNotFound:
            continue  # done just now
        except StoreDenied:
            # Another user's, whose checkpoint nobody here can know: no collection is made beside it while it is fresh.
            if now < entry.modified + EXPIRES:
                raise
        except FormatError as error:
            announcements.append((entry.modified, error))
    return at_work(announcements, now)


def forget_expired(store: Store, now: float, after: float) -> None:
    """Delete announcements that were not renewed for `after` seconds: their processes have died."""
    for entry in list(store.entries(names.ANNOUNCEMENTS)):
        if names.is_announcement(entry.name) and now - entry.modified >= after:
            with contextlib.suppress(StoreError):
                store.delete(entry.name)

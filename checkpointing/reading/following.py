"""Follows a store: its checkpoints one after the other, as a ref comes to point to them.

Only the ref is read, again and again, since no store tells of what is written to it. A store that does not answer is
waited for, and so is one that holds nothing yet.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from checkpointing.errors import MissingTile, StoreDenied, StoreError, StoreNotFound, StoreUnfit, Tampered
from checkpointing.format.names import parse_checkpoint
from checkpointing.reading.naming import LATEST, VERIFIED, VETTED, committed, read_ref
from checkpointing.stores.protocol import Store

MOVING = (LATEST, VERIFIED, VETTED)
"""Refs that can be followed."""


def is_away(error: BaseException) -> bool:
    """Return whether an error says that the store cannot be reached now, so that it may be waited for."""
    if isinstance(error, MissingTile):
        return not error.damaged
    return isinstance(error, StoreError) and not isinstance(error, StoreNotFound | StoreUnfit | StoreDenied | Tampered)


def place(checkpoint: str) -> tuple[int, int, int, int]:
    """Return what orders the names of checkpoints as they were made: generation, step, attempt, and who committed it.

    ValueError for what is no such name.
    """
    parsed = parse_checkpoint(checkpoint)
    if parsed is None:
        raise ValueError(f"{checkpoint!r} is not the name of a checkpoint")
    save, committed_in = parsed
    return save.made_in, save.step, save.attempt, committed_in


class Follower:
    """Names a store's new checkpoints.

    wanted: "latest" for each that is committed, "verified" or "vetted" for each that the ref is found at. done: names
    of those that were seen to before; without any, the newest there is comes first. after: steps up to this one are
    passed over. every: seconds between two looks. say: takes what a person should know, in words, once each time it
    begins and ends.
    """

    def __init__(
        self,
        store: Store,
        wanted: str = LATEST,
        *,
        done: Iterable[str] = (),
        after: int = -1,
        every: float,
        say: Callable[[str], None],
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if wanted not in MOVING:
            raise ValueError(f"{wanted!r} cannot be followed; {', '.join(MOVING)} can")
        self._store, self._wanted, self._after = store, wanted, after
        self._every, self._say, self._sleep = every, say, sleep
        self._last = max((place(name) for name in done), default=None)
        self._seen, self._waiting = False, ""

    def next(self) -> str:
        """Return the next checkpoint, and wait for it; until `passed` is told of it, it is the next one."""
        while True:
            try:
                name = self._due()
            except (StoreError, OSError) as error:
                if isinstance(error, StoreError) and not is_away(error):
                    raise
                self.away(error)
                continue
            if name is not None:
                self._over()
                return name
            self._sleep(self._every)

    def passed(self, name: str) -> None:
        """Go on behind a checkpoint, which has been seen to."""
        self._last = max(place(name), self._last or place(name))

    def away(self, error: BaseException) -> None:
        """Wait a while for a store that does not answer."""
        self._wait_for("away", f"the store does not answer, and is waited for: {error}")
        self._sleep(self._every)

    def _due(self) -> str | None:
        ref = read_ref(self._store)
        if ref is None and self._seen:
            raise StoreError(f"store {self._store.url}: is empty, and was not before")
        self._seen = self._seen or ref is not None
        if ref is not None and self._wanted == LATEST and ref.checkpoint is not None:
            names: Iterable[str] = committed(self._store, ref) if self._last else (ref.checkpoint,)
        else:
            target = ref and {VERIFIED: ref.verified, VETTED: ref.vetted}.get(self._wanted)
            names = (target.checkpoint,) if target else ()
        if not names:
            what = "nothing is committed" if self._wanted == LATEST else f"no checkpoint is {self._wanted}"
            self._wait_for("none", f"{what} in {self._store.url} yet, and is waited for")
            return None
        self._over()
        new = [name for name in names if place(name) > (self._last or ()) and place(name)[1] > self._after]
        return min(new, key=place, default=None)

    def _wait_for(self, why: str, said: str) -> None:
        if self._waiting != why:
            self._waiting = why
            self._say(said)

    def _over(self) -> None:
        if self._waiting:
            self._say("the store answers again" if self._waiting == "away" else "there is a checkpoint now")
        self._waiting = ""

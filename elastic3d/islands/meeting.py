"""What the ranks of one island do together about the store: all wait, fail and try again alike.

Rank 0 alone looks for what others have written, in intervals, for stores tell nobody of news; it says every some
seconds that it still waits, so that no collective of its island runs out of time.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from checkpointing.errors import CheckpointError, MissingTile, NoCheckpoint, StoreError
from elastic3d.clock import Clock
from elastic3d.errors import ConfigurationError, Elastic3dError, StateError, StateUnfit, UsageError
from elastic3d.log import process_log
from elastic3d.parallel.mesh import Mesh

_TURN = 20.0
"""Seconds after which rank 0 says that it still waits: far fewer than a collective may take."""

_LEAST, _MOST = 0.05, 2.0
"""Seconds from one look into the store to the next: a tenth of what was waited, between these."""

_LONGEST_PAUSE = 30.0

_KINDS: dict[str, type[Elastic3dError]] = {
    one.__name__: one for one in (UsageError, ConfigurationError, StateUnfit, StateError)
}

_AGAIN = (StoreError, OSError)


class Deleted(Exception):
    """What a record names is not in the store any more, as seen by any rank."""


class IslandMeeting:
    """See the module. longest: seconds after which waiting for the store ends in StateError."""

    def __init__(self, mesh: Mesh, clock: Clock, *, longest: float, place: str) -> None:
        self._mesh, self._clock, self._longest, self._place = mesh, clock, longest, place
        self._waits = False

    def all(self, action: Callable[[], Any]) -> list[Any]:
        """Do something on every rank; return what all ranks' actions returned, as JSON has it. A collective.

        Where the store does not answer to one of them, all do it again. Deleted where one found nothing there.
        """
        pause, since, announced = 0.5, self._clock.monotonic(), False
        while True:
            said: dict[str, Any]
            try:
                said = {"value": action()}
            except (NoCheckpoint, MissingTile) as error:
                away = isinstance(error, MissingTile) and not error.damaged
                said = {"again" if away else "gone": str(error)}
            except _AGAIN as error:
                said = {"again": f"rank {self._mesh.rank}: {error}"}
            except CheckpointError as error:
                said = {"error": _spelled(self.damaged(error))}
            except Elastic3dError as error:
                said = {"error": _spelled(error)}
            waited = self._clock.monotonic() - since
            said["waited"] = waited
            rows = [json.loads(data) for data in self._mesh.gather(json.dumps(said).encode())]
            for row in rows:
                if "error" in row:
                    raise _error(row["error"])
            for row in rows:
                if "gone" in row:
                    raise Deleted(row["gone"])
            failed = next((row["again"] for row in rows if "again" in row), None)
            if failed is None:
                return [row["value"] for row in rows]
            if rows[0]["waited"] > self._longest:
                raise self.silent(rows[0]["waited"], failed)
            if not announced and self._mesh.rank == 0:
                process_log().emit("island.waiting", why="store", detail=failed)
            announced = True
            self._clock.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def lead(self, action: Callable[[], Any]) -> Any:
        """Do something on rank 0; return on every rank what it returned, as JSON has it. A collective, as `all`."""
        return self.all(lambda: None if self._mesh.rank else action())[0]

    def first(self, look: Callable[[float], Any | None]) -> Any:
        """Have rank 0 look until it sees something; return that on every rank, as JSON has it. A collective.

        look: takes the seconds that were waited; returns None to look again.
        """
        since, self._waits = self._clock.monotonic(), False
        while True:
            data = self._mesh.broadcast(self._turn(look, since) if self._mesh.rank == 0 else None)
            said = json.loads(data)
            if "error" in said:
                raise _error(said["error"])
            if "value" in said:
                return said["value"]

    def over(self, wait: Callable[[float], bool]) -> None:
        """Wait until something is over on every rank; what it raises on one is raised as by `all`. A collective.

        wait: takes the seconds for which it may wait; returns whether it is over.
        """
        while not all(self.all(lambda: wait(_TURN))):
            pass

    def damaged(self, error: Exception) -> StateError:
        """Return what to say of an object that cannot be used."""
        return StateError(
            f"what the islands have in {self._place} cannot be used: {error}. Trying again does not help where it is "
            "damaged: restore the object, or begin anew with another store for the islands"
        )

    def silent(self, waited: float, why: str) -> StateError:
        """Return what to say of a store that has not answered for so many seconds."""
        return StateError(
            f"the islands' store {self._place} did not answer for {waited:.0f} s: {why}. Trying again helps once it "
            "does; Islands(longest=) says how long to wait"
        )

    def _turn(self, look: Callable[[float], Any | None], since: float) -> bytes:
        """Look for some seconds; return what to say to all ranks."""
        begun = self._clock.monotonic()
        while True:
            now = self._clock.monotonic()
            try:
                value = look(now - since)
                if value is not None:
                    return json.dumps({"value": value}).encode()
            except _AGAIN as error:
                if now - since > self._longest:
                    return json.dumps({"error": _spelled(self.silent(now - since, str(error)))}).encode()
                if not self._waits:
                    process_log().emit("island.waiting", why="store", detail=str(error))
                self._waits = True
            except Elastic3dError as error:
                return json.dumps({"error": _spelled(error)}).encode()
            if now - begun > _TURN:
                return b"{}"
            self._clock.sleep(until_next_look(now - since))


def until_next_look(waited: float) -> float:
    """Return the seconds until the store is looked at again, after so many."""
    return min(_MOST, max(_LEAST, waited / 10))


def _spelled(error: Elastic3dError) -> list[str]:
    kind = next((name for name, one in _KINDS.items() if type(error) is one), "StateError")
    return [kind, str(error)]


def _error(said: list[str]) -> Elastic3dError:
    return _KINDS[said[0]](said[1])

"""Copies this slot's snapshots to its buddy, in the order they were taken, on one thread.

Each run of tiles is hashed and then sent, so that this side hashes the next while the other verifies the last. A buddy
that does not answer is tried again, slowly; until it has a snapshot, that snapshot is not held, and training goes on
with fewer snapshots rather than wait. One whose bytes have changed since they were hashed is not sent again: the buddy
finds that, and without one this side looks itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from elastic3d import threads
from elastic3d.clock import SYSTEM, Clock
from elastic3d.log import process_log
from elastic3d.snapshots import table as tables
from elastic3d.snapshots import wire
from elastic3d.snapshots.holdings import Mark
from elastic3d.snapshots.memory import Replication, SnapshotMemory, Stored
from elastic3d.snapshots.server import ALTERED
from elastic3d.trust.channel import Channel, WireError
from elastic3d.trust.credentials import Credentials

_IDLE_SECONDS = 60.0
_RETRY_SECONDS = 0.25

PATIENCE = 5.0
"""Seconds of failures in a row after which a buddy counts as out of reach: by then a dead one has been replaced."""


class Stale(Exception):
    """The buddy knows a newer generation than the snapshot's, or another node as the holder of its rank."""


class Altered(Exception):
    """The snapshot's bytes, here, are not those that it was taken with."""

    def __init__(self, tensor: str) -> None:
        super().__init__(f"{tensor} changed in memory after it was written")
        self.tensor = tensor


class Replicator:
    """Hashes and sends the snapshots in `memory`.

    digested: called once for each snapshot, when its digests are known.
    altered: called with a snapshot whose bytes do not have their digests any more, the tensor, and whether no newer
    snapshot can become safe.
    ended: called after each attempt, with whether the snapshot is now the newest one held twice, the seconds it took,
    the bytes that a buddy has taken, and its address; buffers may have become free.
    unreachable: called with the buddy's address, the seconds and the last error when nothing could be sent to it for
    `patience` seconds, and again after as long. All are called on the replicator's thread.
    """

    def __init__(
        self,
        memory: SnapshotMemory,
        *,
        digested: Callable[[Mark], None],
        altered: Callable[[Mark, str, bool], None] = lambda mark, tensor, fatal: None,
        ended: Callable[[Mark, bool, float, int, str | None], None],
        unreachable: Callable[[str, float, str], None] = lambda buddy, seconds, error: None,
        patience: float = PATIENCE,
        clock: Clock = SYSTEM,
        name: str = "replicator",
    ) -> None:
        self._memory = memory
        self._credentials: Credentials | None = None
        self._digested, self._altered = digested, altered
        self._ended = ended
        self._unreachable, self._patience, self._clock = unreachable, patience, clock
        self._failing: tuple[str, float] | None = None
        self._lock = threading.Lock()
        self._buddy: str | None = None
        self._connection: Channel | None = None
        self._reported: Mark | None = None
        self._changed = threading.Event()
        self._closed = False
        threads.start(self._run, name=name, edge=threads.Edge.AGAIN)

    def set_credentials(self, credentials: Credentials) -> None:
        """Show these to the buddy from now on; before the first call nothing is sent."""
        with self._lock:
            self._credentials = credentials
            self._drop_connection()
        self._changed.set()

    def set_buddy(self, address: str | None) -> None:
        """Send to another tile server from now on; what only the former one has is sent again.

        None: what is at home, and intact, counts as held.
        """
        if address is not None:
            wire.parse_address(address)
        with self._lock:
            if address == self._buddy:
                return
            self._buddy = address
            self._drop_connection()
        self._memory.buddy_changed()
        self._changed.set()

    def close(self) -> None:
        """Stop. A snapshot that is being sent does not reach the buddy."""
        with self._lock:
            self._closed = True
            self._drop_connection()
        self._memory.close()
        self._changed.set()

    def _drop_connection(self) -> None:
        if self._connection is not None:
            self._connection.shutdown()  # wakes the thread that waits on it
            self._connection.close()
            self._connection = None

    def _run(self) -> None:
        while not self._closed:
            work = self._memory.wait_for_work(_IDLE_SECONDS)
            if work is not None and not self._attempt(work):
                self._changed.wait(_RETRY_SECONDS)
                self._changed.clear()

    def _attempt(self, work: Replication) -> bool:
        """Hash and send one snapshot; return False if that is to be tried again after a rest."""
        with self._lock:
            buddy = self._buddy
        held = stale = altered = newer = False
        error = ""
        begun = self._clock.monotonic()
        try:
            held = self._replicate(work, buddy)
        except Stale as problem:
            stale = True
            mark = work.stored.mark
            process_log().emit("replica.stale", generation=mark.generation, step=mark.step, error=str(problem))
        except Altered as problem:
            altered = True
            self._altered(work.stored.mark, problem.tensor, self._memory.altered(work.stored.mark))
        except (WireError, OSError) as problem:
            error = str(problem) or type(problem).__name__
            process_log().emit("replica.failed", step=work.stored.mark.step, buddy=buddy, error=error)
        finally:
            # Whatever happened, it is no longer being sent.
            with self._lock:
                # If the buddy was changed meanwhile, the node that holds or refuses it is no longer the buddy.
                same = self._buddy == buddy
                held = held and same
                newer = self._memory.replicated(work.stored.mark, held=held, refused=altered or (stale and same))
        sent = work.stored.data.nbytes if held and buddy is not None else 0
        self._ended(work.stored.mark, newer, self._clock.monotonic() - begun, sent, buddy)
        self._judge(buddy, error)
        return not error

    def _judge(self, buddy: str | None, error: str) -> None:
        """Report a buddy that has failed for long."""
        now = self._clock.monotonic()
        if not error or buddy is None:
            self._failing = None
        elif self._failing is None or self._failing[0] != buddy:
            self._failing = (buddy, now)
        elif now - self._failing[1] >= self._patience:
            since, self._failing = self._failing[1], (buddy, now)
            self._unreachable(buddy, now - since, error)

    def _replicate(self, work: Replication, buddy: str | None) -> bool:
        if buddy is None:
            try:
                self._check(work.stored)
            finally:
                self._digest(work.stored)
            return True
        try:
            connection = self._connect(buddy)
            if connection is None:
                return False
            self._send(connection, work)
        except (WireError, OSError):
            with self._lock:
                self._drop_connection()
            raise
        finally:
            self._digest(work.stored)
        return True

    def _check(self, stored: Stored) -> None:
        tile = stored.altered()
        if tile is not None:
            raise Altered(tile.spec.key)

    def _digest(self, stored: Stored) -> None:
        stored.digest_all()
        if self._reported is None or stored.mark > self._reported:
            self._reported = stored.mark
            self._digested(stored.mark)

    def _connect(self, buddy: str) -> Channel | None:
        with self._lock:
            if self._connection is not None:
                return self._connection
            credentials = self._credentials
        if credentials is None:
            raise WireError("this node has not joined yet")
        connection = wire.connect(buddy, credentials)
        with self._lock:
            if self._closed or self._buddy != buddy or self._credentials is not credentials:
                connection.close()
                return None
            self._connection = connection
            return connection

    def _send(self, connection: Channel, work: Replication) -> None:
        stored = work.stored
        request = {
            "op": "replicate",
            "generation": stored.mark.generation,
            "step": stored.mark.step,
            "rank": stored.rank,
            "world": stored.world,
            "facts": dict(stored.facts),
            "keep": list(work.keep),
            "base": None if work.base is None else [work.base.generation, work.base.step],
            "identity": stored.table.identity,
            "table": None,
        }
        connection.send(request)
        answer = connection.receive()
        if "table" in answer:
            connection.send({**request, "table": tables.to_wire(stored.table)})
            answer = connection.receive()
        _expect("ok", answer)
        for first, stop in stored.table.runs:
            connection.send_sealed(bytes.fromhex("".join(stored.digest_run(first, stop))))
            low, high = stored.span(first, stop)
            connection.send_bytes(stored.data[low:high])
        self._digest(stored)
        answer = connection.receive()
        if answer.get("error") == ALTERED:
            self._check(stored)  # or else it changed on the way
        _expect("held", answer)


def _expect(word: str, answer: dict[str, object]) -> None:
    if "stale" in answer:
        raise Stale("the buddy knows a newer generation")
    if "denied" in answer:
        raise Stale(f"the buddy does not take it from this node: {answer['denied']}")
    if word not in answer:
        raise WireError(f"the buddy refused: {answer.get('error', answer)}")

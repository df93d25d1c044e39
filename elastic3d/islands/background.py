"""An outer step's exchange on one rank while inner steps go on: its part of the delta goes out, those of all come in.

A thread of each rank of an island does what it does about the store by itself, for a collective beside those of the
training could meet them in another order on another rank. What they have to agree on they find in the store: rank 0
says that the island's delta is there when all ranks' parts are, and all wait for the record.

Nothing here changes the model or the island's state, so that no bits depend on how long it takes: the outer step comes
after a fixed number of inner steps, and waits there for an exchange that is not over.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeVar

import torch

from checkpointing.errors import CheckpointError, Incomplete, MissingTile, StoreError
from elastic3d import threads
from elastic3d.clock import Clock
from elastic3d.errors import Elastic3dError
from elastic3d.islands import tensors
from elastic3d.islands.meeting import until_next_look
from elastic3d.islands.outer import add_up
from elastic3d.islands.outer_parameters import OuterParameters
from elastic3d.islands.record import Sealed, SentDelta
from elastic3d.islands.sealing import SealedStep
from elastic3d.log import process_log
from elastic3d.parallel.state import local
from elastic3d.quantities import seconds
from elastic3d.values import from_json

T = TypeVar("T")

_LEAST_PAUSE, _LONGEST_PAUSE = 0.5, 30.0
"""Seconds from one try to the next where the store does not answer, doubled each time."""


class BackgroundExchange:
    """See the module. own: this rank's part of the delta, which nobody changes meanwhile. token: alike on all ranks.

    Once it is over: the record; the sum of all deltas of each parameter, where the record merges this island's; and the
    bytes that all ranks have sent (0 on others than rank 0) and that this one has read.
    """

    def __init__(
        self, parameters: OuterParameters, own: Mapping[str, torch.Tensor], *, token: str, clock: Clock
    ) -> None:
        self._parameters, self._own, self._clock = parameters, dict(own), clock
        self._exchange, self._mesh = parameters.exchange, parameters.parts.mesh
        self._outer, self._island = parameters.state.outer + 1, parameters.state.island
        self._folder = self._exchange.delta_folder(self._outer, self._island, token)
        self._stopped, self._over = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._waits = False
        self.record: Sealed | None = None
        self.totals: dict[str, torch.Tensor] = {}
        self.sent = self.read = 0

    def start(self) -> None:
        """Begin."""
        self._thread = threads.start(
            self._run, name="elastic3d-islands", edge=threads.Edge.ALONE, failed=self._ended_by
        )

    def over(self, patience: float) -> bool:
        """Return whether it is over, after at most so many seconds; raise what it ended with."""
        over = self._over.wait(patience)
        if self._error is not None:
            raise self._error
        return over

    def stop(self) -> None:
        """End it, as soon as what it asked of the store is answered."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            self._mesh.computes_on.enter_thread()
            if self._asked(lambda: self._exchange.sealed(self._outer)) is None:
                self._send()
            record = self._sealed()
            if record is not None and record.merges(self._island):
                self._add_up(record)
            self.record = record
            self._over.set()
        except (CheckpointError, Elastic3dError) as error:
            self._ended_by(error)

    def _ended_by(self, error: BaseException) -> None:
        self._error = error
        self._over.set()

    def _send(self) -> None:
        """Write this rank's part of the delta, unless all of it is there; and on rank 0 say so once it is."""
        if self._asked(lambda: self._exchange.sent_by(self._outer, self._island)) is not None:
            return
        store = self._exchange.folder(self._folder)
        self._asked(lambda: tensors.write(store, self._mesh, self._own, outer=self._outer))
        if self._mesh.rank == 0:
            self._wait(self._complete)

    def _complete(self, waited: float) -> SentDelta | None:
        """Say that the delta is there, if it is; None while parts of it are not."""
        try:
            whole = tensors.complete(self._exchange.folder(self._folder), self._mesh, outer=self._outer)
        except Incomplete:
            # Ranks that found what this island's last generation had sent just then have written nothing.
            return self._exchange.sent_by(self._outer, self._island)
        mine = SentDelta(
            island=self._island,
            folder=self._folder,
            checkpoint=whole.checkpoint,
            root=whole.root,
            bytes=whole.totals.bytes,
        )
        said = self._exchange.send(self._outer, mine)
        self.sent = mine.bytes if said.folder == self._folder else 0
        return said

    def _sealed(self) -> Sealed | None:
        """Return the record, sealed by rank 0 if by nobody before; None where this was stopped."""
        if self._mesh.rank:
            return self._wait(lambda waited: self._exchange.sealed(self._outer))
        step = SealedStep(self._parameters.islands, self._exchange, self._outer, self._island)
        data = self._wait(step.look)
        return None if data is None else from_json(Sealed, data)

    def _add_up(self, record: Sealed) -> None:
        """Add up this rank's part of all deltas of a record, in its order."""
        parameters, device = self._parameters, self._mesh.computes_on
        for sent in record.merged:
            deltas = self._own
            if sent.folder != self._folder:
                deltas = tensors.rooms_like((name, parameters.state.anchors[name]) for name in self._own)
                store = self._exchange.folder(sent.folder)
                self.read += self._asked(partial(tensors.read, store, sent.checkpoint, deltas, device)) or 0
            for name, delta in deltas.items():
                self.totals[name] = add_up(self.totals.get(name), local(delta))

    def _wait(self, look: Callable[[float], T | None]) -> T | None:
        """Look into the store until there is something; None where this was stopped before."""
        since = self._clock.monotonic()
        while not self._stopped.is_set():
            waited = self._clock.monotonic() - since
            seen = self._asked(partial(look, waited))
            if seen is not None:
                return seen
            self._stopped.wait(until_next_look(waited))
        return None

    def _asked(self, action: Callable[[], T]) -> T | None:
        """Return what the store answers, again and again until it does; None where this was stopped before.

        StateError after `longest`.
        """
        pause, since, meeting = _LEAST_PAUSE, self._clock.monotonic(), self._parameters.meeting
        while not self._stopped.is_set():
            try:
                return action()
            except (StoreError, OSError) as error:
                why = str(error)
            except MissingTile as error:
                if error.damaged:
                    raise
                why = str(error)
            waited = self._clock.monotonic() - since
            if waited > seconds(self._parameters.islands.longest, "longest"):
                raise meeting.silent(waited, why)
            if not self._waits and self._mesh.rank == 0:
                process_log().emit("island.waiting", why="store", detail=why)
            self._waits = True
            self._stopped.wait(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        return None

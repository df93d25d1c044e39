"""The one reader of etcd and of the event files, for all browsers, or for a terminal."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import replace

from elastic3d.clock import SYSTEM, Clock
from elastic3d.dashboard.document import PageDocument, findings_in, generations_in, moments_of
from elastic3d.dashboard.event_files import EventFolder
from elastic3d.dashboard.moments import Moments
from elastic3d.dashboard.store_reading import StoreReader
from elastic3d.errors import Elastic3dError
from elastic3d.health.past_verdicts import PastVerdict, read_bundles
from elastic3d.membership.inspection.keys import RunKeys
from elastic3d.membership.inspection.status import Status
from elastic3d.pages.series import StepFigures, StepSeries

EVERY = 1.0
"""Seconds from one look to the next while somebody watches."""

UNWATCHED = 5.0
"""The same while nobody does: the curves go on, with the resolution of the members' figures."""

SHARE = 4.0
"""Looks that take long are made less often: at least so many times as long apart as one takes."""

LONGEST = 10.0
"""Most seconds that this makes of it."""

EVIDENCE = 10.0
"""Seconds from one look at the bundles of evidence to the next."""

BURST = 64
"""Most looks at the event files in a row, when there is a lot to read at the beginning."""


class JobReader:
    """Looks at a job again and again, and publishes what it saw.

    read: returns the job's status and records, or raises an error of elastic3d's. publish: takes each document.
    watched: whether somebody looks at them. One thread.
    """

    def __init__(
        self,
        read: Callable[[], tuple[Status, RunKeys]],
        publish: Callable[[PageDocument], object],
        *,
        watched: Callable[[], bool] = lambda: True,
        events: EventFolder | None = None,
        store: StoreReader | None = None,
        clock: Clock = SYSTEM,
    ) -> None:
        self._read, self._publish, self._watched, self._events, self._clock = read, publish, watched, events, clock
        self._store = store
        self._bundles: tuple[PastVerdict, ...] = ()
        self._evidence_problems: tuple[str, ...] = ()
        self._evidence_at = -math.inf
        self._moments = Moments()
        self._reported, self._committed = StepSeries(), StepSeries()
        self._document: PageDocument | None = None
        self._wanted = threading.Event()
        self._ended = threading.Event()

    def run(self) -> None:
        """Look until `stop`."""
        while not self._ended.is_set():
            begun = self._clock.monotonic()
            answered = self.look()
            took = self._clock.monotonic() - begun
            pause = EVERY if self._watched() else UNWATCHED
            if answered:
                pause = max(pause, min(LONGEST, SHARE * took))
            self._wanted.wait(pause)
            self._ended.wait(max(0.0, begun + EVERY - self._clock.monotonic()))
            self._wanted.clear()

    def stop(self) -> None:
        """End `run` soon. From any thread."""
        self._ended.set()
        self._wanted.set()

    def hurry(self) -> None:
        """Look again a second after the last look began: somebody came to watch, or gave an order. From any thread."""
        self._wanted.set()
        if self._store is not None:
            self._store.hurry()

    def look(self) -> bool:
        """Look once; return whether etcd answered.

        Where it does not, what it last showed is kept, and the view says why it is old. Raises the error only if
        nothing was ever seen.
        """
        try:
            self._document = self._seen(*self._read())
        except Elastic3dError as error:
            if self._document is None:
                raise
            if self._ended.is_set():
                return False
            self._document = replace(self._followed(self._document), away=" ".join(str(error).split()))
        document = self._document
        self._publish(document)
        return not document.away

    def _seen(self, status: Status, run_keys: RunKeys) -> PageDocument:
        now = self._clock.wall()
        if status.generation is not None and status.step >= 0:
            self._reported.add(
                StepFigures(
                    step=status.step,
                    loss=status.loss,
                    seconds=status.step_seconds,
                    generation=status.generation.number,
                )
            )
        document = PageDocument(
            status=status,
            generations=generations_in(run_keys),
            findings=(),
            moments=moments_of(status, self._moments, now),
            read_at=now,
        )
        document = self._followed(document)
        troubles = self._events.troubles if self._events is not None else ()
        return replace(document, findings=findings_in(run_keys, troubles, self._bundles))

    def _followed(self, document: PageDocument) -> PageDocument:
        """Return the document with what the event files and the pulses have brought."""
        folder = self._events
        if folder is not None:
            for _ in range(BURST):
                news = folder.look()
                for figures in news.steps:
                    self._committed.add(figures)
                if not news.more or self._ended.is_set():
                    break
            if self._clock.monotonic() - self._evidence_at >= EVIDENCE:
                self._bundles, self._evidence_problems = read_bundles(folder.folder)
                self._evidence_at = self._clock.monotonic()
        series = self._committed if len(self._committed) else self._reported
        return replace(
            document,
            chunks=series.chunks(),
            newest=tuple(series.newest),
            notables=tuple(reversed(folder.notables)) if folder is not None else None,
            problems=(*folder.problems, *self._evidence_problems) if folder is not None else (),
            store=self._store.seen() if self._store is not None else None,
        )

"""A slot's watch, as its loop uses it: which trainers have a page for their progress, and what their end says of it."""

from __future__ import annotations

import dataclasses

from elastic3d.health.record import ProgressPage, parse
from elastic3d.health.watch import SlotWatch
from elastic3d.log import process_log
from elastic3d.port import Assignment
from elastic3d.worker.processes.events import ExitKind


class Watchers:
    """The pages of a slot's trainers, by number, for the slot's thread. watch: None where nobody is watched."""

    def __init__(self, watch: SlotWatch | None) -> None:
        self._watch = watch
        self._pages: dict[int, ProgressPage] = {}

    def prepare(self, trainer: int, assignment: Assignment) -> Assignment:
        """Make a page for a trainer that is to have one; return its assignment, which says whether it has."""
        recorded = False
        if assignment.recorded and self._watch is not None:
            try:
                self._pages[trainer] = ProgressPage()
                recorded = True
            except OSError as error:
                process_log().emit("rank.unwatched", error=str(error))
        return dataclasses.replace(assignment, recorded=recorded)

    def descriptors(self, trainer: int) -> tuple[int, ...]:
        """Return what the trainer inherits."""
        page = self._pages.get(trainer)
        return page.descriptors if page is not None else ()

    def begin(self, trainer: int, pid: int, assignment: Assignment) -> None:
        """Watch a trainer from now on: it is there and was let go."""
        page = self._pages.get(trainer)
        if self._watch is not None and page is not None:
            layout = assignment.layout
            self._watch.begin(
                trainer,
                pid=pid,
                rank=assignment.rank,
                generation=assignment.store_prefix,
                page=page,
                tensor=layout is not None and layout.tp > 1,
            )

    def waited(self, trainer: int) -> bool:
        """Return whether a trainer that has ended was within a collective then, or had begun one for later."""
        page = self._pages.get(trainer)
        record = parse(page.copy()) if page is not None else None
        if record is None:
            return False
        return record.wait is not None or any(axis.posted > axis.done for axis in record.axes)

    def ended(self, trainer: int, kind: ExitKind) -> None:
        """Watch a trainer no more. Its last record is reported unless it was done; see `SlotWatch.end`."""
        page = self._pages.pop(trainer, None)
        if self._watch is not None and page is not None:
            hurt = True if kind in (ExitKind.PEER_LOST, ExitKind.CRASH) else False if kind is ExitKind.STOPPED else None
            self._watch.end(trainer, hurt=hurt)
            page.close()

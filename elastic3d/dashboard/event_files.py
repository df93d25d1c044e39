"""The event files of a run, followed while they grow: steps, and what people should know.

The files are those that `elastic3d.log` writes: `<node>-<slot>.jsonl`, and beside it an older one, `.jsonl.1`. They may
be half written, huge, or hold anything at all; what cannot be read is passed over, and a later look goes on.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from elastic3d.accounting.recorded_events import SECOND, RecordedEvent, recorded
from elastic3d.errors import UsageError
from elastic3d.health.meanings import MEANINGS
from elastic3d.health.trouble import Trouble, is_trouble
from elastic3d.log import EVENTS, Level
from elastic3d.pages.series import StepFigures, step_figures

FIRST = 64 << 20
"""Most bytes at the end of a file that are read when it is first seen."""

FIRST_OF_ALL = 256 << 20
"""About as many bytes of all files together; at least `LONGEST` of each."""

MOST = 8 << 20
"""Most bytes of each file that are read in one look."""

MOST_OF_ALL = 64 << 20
"""About as many bytes of all files together."""

LONGEST = 1 << 20
"""Bytes of a line beyond which it is no event."""

KEPT = 200
"""Most notable events, and most troubles, that are kept."""

_NAME = re.compile(rb'"event": ?"([a-z_]+\.[a-z_]+)"')

ALSO = ("checkpoint.mended", "rank.recovered", "node.well", "snapshot.fresh", "peer.reachable")
"""Events that are kept beside warnings and errors: such a one is over."""


_WANTED = {
    name.encode()
    for name, kind in EVENTS.items()
    if kind.level >= Level.WARNING or name in ALSO or name in MEANINGS or name == "step.committed"
}


@dataclass(frozen=True, slots=True, kw_only=True)
class NotableEvent:
    """An event that people should know. node: who wrote it. said: its fields, in words."""

    at: float
    name: str
    level: Level
    node: str
    generation: int
    said: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EventNews:
    """What one look brought. steps: in order of generation and step."""

    steps: tuple[StepFigures, ...] = ()
    more: bool = False


@dataclass(slots=True)
class _Place:
    """How far a file was read. inode: which file it was."""

    inode: int
    offset: int
    skip: bool = False


@dataclass(slots=True)
class EventFolder:
    """The folder; for one thread.

    notables: newest last. troubles: events that `elastic3d explain` explains, newest last. problems: files that cannot
    be read, and why.
    """

    folder: Path
    run: str = ""
    notables: list[NotableEvent] = field(default_factory=list)
    troubles: list[Trouble] = field(default_factory=list)
    problems: tuple[str, ...] = ()
    _places: dict[str, _Place] = field(default_factory=dict)
    _seen: set[tuple[object, ...]] = field(default_factory=set)

    def __post_init__(self) -> None:
        if not self.folder.is_dir():
            raise UsageError(
                f"--events {str(self.folder)!r}: there is no such folder; give the one that the script names in "
                "elastic3d.run(events=...)"
            )

    def look(self) -> EventNews:
        """Read what is new."""
        events: list[RecordedEvent] = []
        problems, more = [], False
        try:
            names = sorted(entry.name for entry in os.scandir(self.folder) if entry.name.endswith(".jsonl"))
        except OSError as error:
            self.problems = (f"{self.folder}: {error.strerror}",)
            return EventNews()
        first, taken = min(FIRST, max(LONGEST, FIRST_OF_ALL // max(1, len(names)))), 0
        for name in names:
            if taken > MOST_OF_ALL:
                more = True
                break
            try:
                read, rest = self._read(name, first)
            except OSError as error:
                problems.append(f"{name}: {error.strerror}")
                continue
            more = more or rest
            taken += sum(map(len, read))
            events += filter(None, (_event(line) for line in read))
        self.problems = tuple(problems)
        steps = []
        for event in events:
            if self.run and event.run not in ("", self.run):
                continue
            if event.name == "step.committed":
                figures = _figures(event)
                if figures is not None:
                    steps.append(figures)
                continue
            try:
                self._note(event)
            except (TypeError, ValueError, OverflowError, RecursionError):
                continue  # its fields are not such as elastic3d writes
        steps.sort(key=lambda figures: (figures.generation, figures.step))
        return EventNews(steps=tuple(steps), more=more)

    def _note(self, event: RecordedEvent) -> None:
        name, at, generation, line = event.name, event.at / SECOND, event.generation, dict(event.fields)
        kind = EVENTS[name]
        if is_trouble(name, line):
            one = Trouble(event=name, generation=generation, at=at, fields=line)
            key = (name, generation, one.step, line.get("micro_batch"), one.nodes)
            if key not in self._seen:
                self._seen.add(key)
                self.troubles = [*self.troubles[-KEPT + 1 :], one]
        if kind.level >= Level.WARNING or name in ALSO:
            fields = [f"{field}={line[field]}" for field in kind.fields if line.get(field) not in (None, "", [])]
            detail = line.get("detail") or line.get("error") or " ".join(fields)
            notable = NotableEvent(
                at=at,
                name=name,
                level=kind.level,
                node=event.node[:200],
                generation=generation,
                said=str(detail)[:600],
            )
            self.notables = sorted([*self.notables, notable], key=lambda event: event.at)[-KEPT:]

    def _read(self, name: str, first: int) -> tuple[list[bytes], bool]:
        """Return the new whole lines of a file, and whether there is more to read at once."""
        path = self.folder / name
        stat = path.stat()
        place = self._places.get(name)
        lines: list[bytes] = []
        if place is None:
            start = max(0, stat.st_size - first)
            place = self._places[name] = _Place(stat.st_ino, start, skip=start > 0)
            if not start:
                lines += self._older(name, None)
        elif place.inode != stat.st_ino:
            lines += self._older(name, place)
            self._places[name] = place = _Place(stat.st_ino, 0)
        elif stat.st_size < place.offset:
            place.offset, place.skip = 0, False
        if stat.st_size == place.offset:
            return lines, False
        return lines + _lines(path, place), stat.st_size - place.offset > LONGEST

    def _older(self, name: str, place: _Place | None) -> list[bytes]:
        """Return the lines of the file that was renamed, from where reading had stopped."""
        path = self.folder / f"{name}.1"
        try:
            stat = path.stat()
            if place is None:
                start = max(0, stat.st_size - MOST)
                place = _Place(stat.st_ino, start, skip=start > 0)
            return _lines(path, place) if stat.st_ino == place.inode else []
        except OSError:
            return []  # there is none


def _lines(path: Path, place: _Place) -> list[bytes]:
    with path.open("rb") as file:
        file.seek(place.offset)
        data = file.read(MOST)
    end = data.rfind(b"\n") + 1
    if not end:
        if len(data) > LONGEST:
            place.offset, place.skip = place.offset + len(data), True
        return []
    place.offset += end
    lines = data[:end].split(b"\n")
    if place.skip:
        place.skip = False
        del lines[0]
    return lines


def _event(line: bytes) -> RecordedEvent | None:
    """Return an event of the list, None for anything else."""
    named = _NAME.search(line) if len(line) <= LONGEST else None
    if named is None or named[1] not in _WANTED:
        return None  # most are not parsed at all
    event = recorded(line)
    return event if event is not None and event.name in EVENTS else None


def _figures(event: RecordedEvent) -> StepFigures | None:
    seconds = event.fields.get("seconds")
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        return None
    return step_figures(event.whole("step"), event.fields.get("loss"), seconds, event.generation)

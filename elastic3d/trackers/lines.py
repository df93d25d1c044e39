"""Points as lines of text: CSV and JSON lines, each step once, whoever wrote before.

A line counts if it is whole. What a node that died had begun to write is removed at the next opening.
"""

from __future__ import annotations

import csv
import io
import json
import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import BinaryIO

from elastic3d.errors import TrackerError
from elastic3d.trackers.media import Medium
from elastic3d.trackers.tracker import Position, Tracker

STEP, AT, GENERATION = "step", "at", "generation"

LONGEST = 1 << 20
"""Bytes of a line, at most; longer ones are none of ours."""

_STRANGE = "what is there was not written by this tracker: move it away, or name another file"


class LineTracker(Tracker):
    """Writes one line for each point to a medium."""

    def __init__(self, medium: Medium) -> None:
        self._medium = medium
        self._unwritten = bytearray()

    @property
    def every(self) -> float:
        """Seconds from one flush to the next: as often as the medium can bear."""
        return self._medium.every

    def open(self, run_id: str, config: Mapping[str, str | int]) -> Position | None:
        """Take over what is there, without an incomplete end."""
        self._unwritten.clear()
        return self._medium.take(self._copied)

    def write(self, step: int, values: Mapping[str, float], at: float) -> None:
        """Keep a line for the next flush."""
        self._unwritten += self._line(step, values, at)

    def flush(self) -> None:
        """Write the lines."""
        data = bytes(self._unwritten)
        self._unwritten.clear()
        self._medium.append(data)

    def rewind(self, step: int) -> bool:
        """Write the file anew without later points; before the first step it is kept under another name."""
        if step == 0:
            self._medium.set_aside()
        self._medium.take(lambda old, new: self._copied(old, new, newest=step))
        return True

    def close(self) -> None:
        """Forget what was not flushed: this node may no longer be the one that writes."""
        self._unwritten.clear()
        self._medium.release()

    def _copied(self, old: BinaryIO, new: BinaryIO, newest: int | None = None) -> Position | None:
        """Copy whole lines of rising steps, up to `newest`; return where the last one stands.

        Lines that are none of ours stay where they are, but not at the end.
        """
        self._begin(old, new)
        position: Position | None = None
        strange: list[bytes] = []
        while line := old.readline(LONGEST):
            read = self._read(line) if line.endswith(b"\n") else None
            if read is None:
                strange.append(line)
                if position is None and newest is None and not self._torn(line):
                    raise TrackerError(_STRANGE)
                continue
            if (position is None or read.step > position.step) and (newest is None or read.step <= newest):
                new.writelines(strange)
                new.write(self._widened(line))
                position = read
            strange.clear()
        return position

    def _begin(self, old: BinaryIO, new: BinaryIO) -> None:
        """Copy what stands before the points."""

    def _widened(self, line: bytes) -> bytes:
        return line

    def _torn(self, line: bytes) -> bool:
        """Return whether a first line may be the beginning of one of ours."""
        return not line.endswith(b"\n")

    @abstractmethod
    def _read(self, line: bytes) -> Position | None:
        """Return what point a line is; None for none."""

    @abstractmethod
    def _line(self, step: int, values: Mapping[str, float], at: float) -> bytes: ...


class JsonLines(LineTracker):
    """One JSON object a line: "step", "at" and the values; null for those that are not finite."""

    def _read(self, line: bytes) -> Position | None:
        try:
            content = json.loads(line)
        except ValueError:
            return None
        if not isinstance(content, dict) or not _whole(content.get(STEP)):
            return None
        generation = content.get(GENERATION, 0)
        return Position(content[STEP], generation if _whole(generation) else 0)

    def _torn(self, line: bytes) -> bool:
        return not line.endswith(b"\n") and (b'{"step": '.startswith(line[:9]))

    def _line(self, step: int, values: Mapping[str, float], at: float) -> bytes:
        plain = {
            name: (value if _whole(value) else float(value)) if math.isfinite(value) else None
            for name, value in values.items()
            if name not in (STEP, AT)
        }
        return json.dumps({STEP: step, AT: round(at, 3), **plain}).encode() + b"\n"


class Csv(LineTracker):
    """Comma-separated values under a header that begins with "step" and "at"; columns are added as values come."""

    def __init__(self, medium: Medium) -> None:
        super().__init__(medium)
        self._columns: list[str] = []
        self._width = 0  # cells of the lines that are copied
        self._more = b""  # what each of them lacks

    def open(self, run_id: str, config: Mapping[str, str | int]) -> Position | None:
        """Take over what is there, with its columns."""
        self._columns = []
        return super().open(run_id, config)

    def write(self, step: int, values: Mapping[str, float], at: float) -> None:
        """Keep a line for the next flush; a value of a new name first adds its column to all lines that are there."""
        new = [name for name in (STEP, AT, *values) if name not in self._columns]
        if new:
            if self._unwritten:
                self.flush()
            self._columns += new
            self._medium.take(self._copied)
        super().write(step, values, at)

    def _begin(self, old: BinaryIO, new: BinaryIO) -> None:
        header = old.readline(LONGEST)
        if not header.endswith(b"\n") and not f"{STEP},{AT},".encode().startswith(header[:8]):
            raise TrackerError(_STRANGE)
        if header.endswith(b"\n"):
            names = next(csv.reader([header.decode(errors="replace").rstrip("\r\n")]), [])
            if names[:2] != [STEP, AT]:
                raise TrackerError(_STRANGE)
            self._columns = [*names, *(name for name in self._columns if name not in names)]
            self._width = len(names)
            self._more = b"," * (len(self._columns) - self._width)
        if self._columns:
            new.write(_row(self._columns))

    def _read(self, line: bytes) -> Position | None:
        try:
            row = next(csv.reader([line.decode().rstrip("\r\n")]), [])
            if len(row) != self._width:
                return None
            names = self._columns[: self._width]
            at = names.index(GENERATION) if GENERATION in names else None
            generation = float(row[at]) if at is not None and row[at] else 0
            return Position(int(row[0]), int(generation))
        except (ValueError, csv.Error, OverflowError):
            return None

    def _widened(self, line: bytes) -> bytes:
        return line.rstrip(b"\r\n") + self._more + b"\n" if self._more else line

    def _line(self, step: int, values: Mapping[str, float], at: float) -> bytes:
        known = {**{name: _number(value) for name, value in values.items()}, STEP: str(step), AT: f"{at:.3f}"}
        return _row([known.get(name, "") for name in self._columns])


def _row(cells: list[object] | list[str]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow([_one_line(cell) for cell in cells])
    return text.getvalue().encode()


def _number(value: float) -> str:
    """Return a number as text that has all its bits; numpy's are floats here."""
    return str(value) if _whole(value) else repr(float(value))


def _one_line(cell: object) -> object:
    return " ".join(cell.splitlines()) if isinstance(cell, str) else cell


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)

"""The file of evaluations: one JSON object a line, each checkpoint once, whatever ends the process that writes it."""

from __future__ import annotations

import fcntl
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from elastic3d.errors import UsageError


class Results:
    """The results of one store's checkpoints in a file; for one process at a time.

    A line has "step", "at" (seconds since 1970), "checkpoint", "store", and the script's numbers; null for those that
    are not finite. Lines of other stores, and others' lines, stay.
    """

    def __init__(self, file: Path, store: str) -> None:
        self._file, self._store = file, store
        self.points: dict[str, tuple[int, float, dict[str, float]]] = {}
        """Step, time and numbers by checkpoint."""

    def __enter__(self) -> Self:
        """Take the file over; UsageError where another process has it, or it cannot be written."""
        try:
            self._opened = self._file.open("a+b")
        except OSError as error:
            raise UsageError(f"--out {self._file}: cannot be written: {error.strerror or error}") from error
        try:
            fcntl.flock(self._opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._opened.close()
            raise UsageError(f"--out {self._file}: another command writes it; give each a file of its own") from error
        self._opened.seek(0)
        self._data = self._opened.read()
        for line in self._data.splitlines():
            self._read(line)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Let go of it."""
        self._opened.close()

    def add(self, checkpoint: str, step: int, at: float, values: Mapping[str, float]) -> None:
        """Write one evaluation; it is on disk when this returns."""
        plain = {name: value if math.isfinite(value) else None for name, value in values.items()}
        entry = {"step": step, "at": round(at, 3), "checkpoint": checkpoint, "store": self._store, **plain}
        torn = bool(self._data) and not self._data.endswith(b"\n")
        self._opened.write((b"\n" if torn else b"") + json.dumps(entry).encode() + b"\n")
        self._opened.flush()
        os.fsync(self._opened.fileno())
        self._data = b"\n"
        self.points[checkpoint] = step, at, dict(values)

    def _read(self, line: bytes) -> None:
        try:
            entry: dict[str, Any] = json.loads(line)
            if entry.pop("store") != self._store:
                return
            checkpoint, step, at = str(entry.pop("checkpoint")), int(entry.pop("step")), float(entry.pop("at"))
            values = {name: math.nan if value is None else float(value) for name, value in entry.items()}
        except (ValueError, KeyError, TypeError, AttributeError):
            return  # cut short when its process was killed, or somebody else's
        self.points[checkpoint] = step, at, values

"""Nodes that come and go: traces read from files, or drawn from a seed.

A trace has rows `seconds since start, nodes held`; a change at a second is a pair of rows, the count before and after.
Files with other units of time are read as well, if that is said.
"""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass
from pathlib import Path

from elastic3d.errors import UsageError
from elastic3d.quantities import TIMES

UNITS = f"What the trace's times count: {', '.join(TIMES)}. Default: s."
"""The help of the option for it."""

LONGEST = 366 * 86400.0
"""Seconds of a trace beyond which its times are taken for those of a smaller unit, unless one is said."""

BUSIEST = 10
"""Changes that no trace has within as many seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """From `at` seconds on, so many nodes are held."""

    at: float
    nodes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Changes in order of time, and the seconds of the last row."""

    changes: tuple[Held, ...]
    end: float


def read_trace(path: Path, unit: str | None = None) -> Trace:
    """Return the trace of a file, which is read once; UsageError, naming the line, where it is none.

    unit: of its times, one of `quantities.TIMES`; None for seconds, of which a trace has a plausible number.
    """
    if unit is not None and unit not in TIMES:
        raise UsageError(f"--unit {unit}: give one of {', '.join(TIMES)}")
    scale = TIMES[unit or "s"]
    try:
        # Spreadsheets begin a file with a mark of its encoding.
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise UsageError(f"--trace {path}: it cannot be read ({reason}); give a file of seconds,nodes") from None
    changes: list[Held] = []
    newest = 0.0
    for number, row in enumerate(csv.reader(text.splitlines()), start=1):
        if not row:
            continue
        where = f"--trace {path}: line {number}"
        at, nodes = _row(row, where, scale)
        if at < newest:
            raise UsageError(f"{where}: its time, {at:g}, is before that of the line above, {newest:g}")
        newest = at
        if changes and changes[-1].at == at:
            changes.pop()
        if not changes or changes[-1].nodes != nodes:
            changes.append(Held(at=at, nodes=nodes))
    if not changes:
        raise UsageError(f"--trace {path}: it has no rows; expected lines such as 21529,4")
    if not max(change.nodes for change in changes):
        raise UsageError(f"--trace {path}: it never holds a node")
    if unit is None:
        _check_unit(f"--trace {path}", changes, newest)
    return Trace(changes=tuple(changes), end=newest)


def _check_unit(where: str, changes: list[Held], end: float) -> None:
    if len(changes) > max(BUSIEST, end):
        raise UsageError(
            f"{where}: its nodes change {len(changes)} times within {end:.3g} s; if its times are hours give --unit h, "
            "and --unit s if they are seconds"
        )
    if end > LONGEST:
        raise UsageError(
            f"{where}: it takes {end / 86400:,.0f} days; if its times are milliseconds give --unit ms, and --unit s if "
            "they are seconds"
        )


def _row(row: list[str], where: str, scale: float) -> tuple[float, int]:
    if len(row) != 2:
        raise UsageError(f"{where}: it has {len(row)} field(s); expected two, a time and nodes")
    try:
        at, nodes = float(row[0]) * scale, int(row[1])
    except ValueError:
        raise UsageError(f"{where}: {','.join(row)!r} are no two numbers; expected a time and nodes") from None
    if not math.isfinite(at) or at < 0:
        raise UsageError(f"{where}: its time is {row[0]}; times count from the start, 0 and more")
    if nodes < 0:
        raise UsageError(f"{where}: it holds {nodes} nodes; expected 0 and more")
    return at, nodes


def scaled(changes: tuple[Held, ...], peak: int) -> tuple[Held, ...]:
    """Return the trace with its largest count made `peak`, and the others in proportion."""
    most = max(change.nodes for change in changes)
    result: list[Held] = []
    for change in changes:
        nodes = min(peak, math.ceil(change.nodes * peak / most))
        if not result or result[-1].nodes != nodes:
            result.append(Held(at=change.at, nodes=nodes))
    return tuple(result)

"""One line of an event file. What a file says is not believed: fields of another type than expected count as absent."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

SECOND = 1_000_000
"""Microseconds: all times of this package are whole microseconds, so that sums are exact."""

LATEST = 10**11
"""Seconds since the epoch, in the year 5138: what is later is no time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedEvent:
    """One event. at: microseconds since the epoch, by the wall clock of its node. generation: 0 where it has none."""

    name: str
    at: int
    node: str
    run: str = ""
    generation: int = 0
    slot: int = 0
    rank: int | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)

    def text(self, name: str) -> str:
        """Return a text, "" where there is none."""
        value = self.fields.get(name)
        return value if isinstance(value, str) else ""

    def whole(self, name: str) -> int | None:
        """Return a whole number that is not negative, None where there is none."""
        return _whole(self.fields.get(name))

    def span(self, name: str) -> int:
        """Return a duration given in seconds as microseconds, 0 where there is none."""
        return span_of(self.fields.get(name))

    def names(self, name: str) -> tuple[str, ...]:
        """Return a list of texts, () where there is none."""
        value = self.fields.get(name)
        return tuple(one for one in value if isinstance(one, str)) if isinstance(value, list) else ()

    def says(self, name: str) -> bool:
        """Whether a field is true."""
        return self.fields.get(name) is True


def span_of(seconds: object) -> int:
    """Return a number of seconds as microseconds; 0 if it is none, or negative."""
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds <= LATEST:
        return 0
    return round(seconds * SECOND)


def recorded(line: str | bytes, node: str = "") -> RecordedEvent | None:
    """Return the event of one line, None where it is not a whole event. node: whose file it is, if the line says not.

    A crash in mid-write leaves half a line, a full disk a line that others follow on.
    """
    try:
        data = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(data, dict):
        return None
    name, at, own = data.get("event"), data.get("at"), data.get("node")
    if not isinstance(name, str) or isinstance(at, bool) or not isinstance(at, int | float):
        return None
    if not 0 <= at <= LATEST:  # nor is NaN
        return None
    run = data.get("run")
    return RecordedEvent(
        name=name,
        at=round(at * SECOND),
        node=own if isinstance(own, str) and own else node,
        run=run if isinstance(run, str) else "",
        generation=_whole(data.get("generation")) or 0,
        slot=_whole(data.get("slot")) or 0,
        rank=_whole(data.get("rank")),
        fields=data,
    )


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 53 else None

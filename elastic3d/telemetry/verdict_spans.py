"""The spans of what was found wrong: silences of ranks, hearings, and verdicts with what they are of.

A hearing begins when ranks differ, a verdict with the hearing that led to it, or with what it is of: the first rank's
silence, the first step that a node was slow in. One event of one node has the parts of all ranks, which are children.
What one step alone shows is a moment.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from elastic3d.telemetry.span import MOST, NodeTrace, TraceSpan

HEARINGS = ("audit.failed", "audit.inconclusive", "exam.failed")
"""Ranks differed, and what they differed on was computed again."""

VERDICTS = (
    "rank.stuck",
    "training.stalled",
    "node.lying",
    "state.altered",
    "vote.split",
    "update.wrong",
    "node.slow",
    "memory.short",
    "run.rolled_back",
)
"""Somebody or something was found to be wrong."""

_ABOUT = (
    "fault", "kind", "compared", "where", "finding", "ranks", "nodes", "step", "micro_batch", "act", "acted",
    "confidence", "rung", "rho", "since", "cost", "clean", "detail", "rank", "slot",
)  # fmt: skip
"""Fields of these events that become attributes."""

_OF_STANDSTILLS = ("rank.stuck", "training.stalled")


class VerdictSpans:
    """Takes one node's events in their order."""

    def __init__(self, trace: NodeTrace) -> None:
        self._trace = trace
        self._silent: dict[tuple[int, int], tuple[float, dict[str, Any]]] = {}
        self._heard: tuple[int, object, float] | None = None

    def observe(self, event: str, fields: Mapping[str, Any], at: float, generation: int) -> Iterator[TraceSpan]:
        """Take an event of a generation; yield the spans that it ends."""
        rank = int(fields.get("rank", -1))
        if event == "rank.suspected":
            about = {name: fields.get(name) for name in ("step", "phase", "state", "odd", "detail", "rank")}
            self._silent[generation, rank] = (at - float(fields["seconds"]), about)
        elif event == "rank.recovered" and (generation, rank) in self._silent:
            start, about = self._silent.pop((generation, rank))
            yield self._trace.own("rank.silent", generation, start, at, about)
        elif event == "generation.sealed":
            yield from self.end(at)
        elif event in HEARINGS:
            yield from self._hearing(event, fields, at, generation)
        elif event in VERDICTS:
            yield from self._verdict(event, fields, at, generation)

    def end(self, at: float) -> Iterator[TraceSpan]:
        """Yield the silences that end with their generation."""
        silent, self._silent = self._silent, {}
        for (generation, _), (start, about) in silent.items():
            yield self._trace.own("rank.silent", generation, start, at, about, error="it did not move again")

    def _hearing(self, event: str, fields: Mapping[str, Any], at: float, generation: int) -> Iterator[TraceSpan]:
        start = at - float(fields.get("seconds") or 0.0)
        # What nobody could decide is told twice: as what differed, and as what came of it.
        if self._heard is None or self._heard[:2] != (generation, fields.get("step")):
            self._heard = (generation, fields.get("step"), start)
        whole = self._found("hearing", event, fields, self._heard[2], at, generation)
        yield whole
        for rank, seconds in enumerate((fields.get("parts") or ())[:MOST]):
            end = start + float(seconds)
            yield self._trace.own("hearing.repeat", generation, start, end, {"rank": rank}, parent=whole.id)

    def _verdict(self, event: str, fields: Mapping[str, Any], at: float, generation: int) -> Iterator[TraceSpan]:
        starts = [at - float(fields.get("seconds") or 0.0)]
        silences = [float(seconds) for seconds in fields.get("silent") or ()]
        if event in _OF_STANDSTILLS:
            starts += [start for (number, _), (start, _) in self._silent.items() if number == generation]
            starts += [at - seconds for seconds in silences]
        elif self._heard is not None and self._heard[:2] == (generation, fields.get("step")):
            starts.append(self._heard[2])
        whole = self._found("verdict", event, fields, min(starts), at, generation)
        yield whole
        for rank, seconds in enumerate(silences[:MOST]):
            yield self._trace.own("verdict.silence", generation, at - seconds, at, {"rank": rank}, parent=whole.id)

    def _found(
        self, name: str, event: str, fields: Mapping[str, Any], start: float, at: float, generation: int
    ) -> TraceSpan:
        about = {"event": event, **{key: fields.get(key) for key in _ABOUT}}
        return self._trace.own(name, generation, start, at, about)

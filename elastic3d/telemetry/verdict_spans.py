"""The spans of what was found wrong: silences of ranks, hearings, and verdicts with what they are of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from elastic3d.telemetry.span import NodeTrace, TraceSpan

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
            seconds = float(fields.get("seconds") or 0.0)
            yield self._found("hearing", event, fields, at - seconds, at, generation)
        elif event in VERDICTS:
            silent = [start for (number, _), (start, _) in self._silent.items() if number == generation]
            start = min([at, *silent]) if event in _OF_STANDSTILLS else at
            yield self._found("verdict", event, fields, start, at, generation)

    def end(self, at: float) -> Iterator[TraceSpan]:
        """Yield the silences that end with their generation."""
        silent, self._silent = self._silent, {}
        for (generation, _), (start, about) in silent.items():
            yield self._trace.own("rank.silent", generation, start, at, about, error="it did not move again")

    def _found(
        self, name: str, event: str, fields: Mapping[str, Any], start: float, at: float, generation: int
    ) -> TraceSpan:
        about = {"event": event, **{key: fields.get(key) for key in _ABOUT}}
        return self._trace.own(name, generation, start, at, about)

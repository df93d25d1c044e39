"""The spans of a node's trainers: each one's life, and its beginning, part by part."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from elastic3d.telemetry.span import BEGINNING, NodeTrace, TraceSpan

FAILED = ("error", "out_of_memory", "convicted", "crash", "template")
"""Exits of trainers that should not have ended so."""

MOST = 4096
"""Trainers whose exits may be awaited at one time."""


class TrainerSpans:
    """Takes one node's events in their order."""

    def __init__(self, trace: NodeTrace) -> None:
        self._trace = trace
        self._started: dict[tuple[int, int], float] = {}

    def observe(self, event: str, fields: Mapping[str, Any], at: float, generation: int) -> Iterator[TraceSpan]:
        """Take an event of a generation; yield the spans that it ends."""
        rank, slot = fields.get("rank"), fields.get("slot")
        if rank is None:
            return
        match event:
            case "trainer.started":
                while len(self._started) >= MOST:
                    del self._started[next(iter(self._started))]
                self._started[generation, rank] = at
            case "state.restored":
                yield from self._begun(fields, at, generation)
            case "trainer.exited":
                start = self._started.pop((generation, rank), at)
                kind = str(fields.get("kind"))
                error = str(fields.get("error") or kind) if kind in FAILED else ""
                more = {"kind": kind, "step": fields.get("step"), "rank": rank, "slot": slot}
                yield self._trace.own("trainer", generation, start, at, more, error=error)
            case _:
                pass

    def _begun(self, fields: Mapping[str, Any], at: float, generation: int) -> Iterator[TraceSpan]:
        parts = [(str(name), float(seconds), float(used)) for name, seconds, used in fields.get("parts") or ()]
        start = at - sum(seconds for _, seconds, _ in parts)
        more = {name: fields.get(name) for name in ("source", "step", "detail", "rank", "slot")}
        whole = self._trace.own("trainer.begin", generation, start, at, more, parent=(BEGINNING,))
        yield whole
        for name, seconds, used in parts:
            about = {"processor_seconds": used, "rank": more["rank"]}
            end = start + seconds
            yield self._trace.own(f"trainer.begin.{name}", generation, start, end, about, parent=whole.id)
            start = end

"""The spans of checkpoints: the parts that slots write, and the commit. A checkpoint belongs to where it was made."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from elastic3d.telemetry.span import CHECKPOINT, ROOT, NodeTrace, TraceSpan


class CheckpointSpans:
    """Takes one node's events in their order."""

    def __init__(self, trace: NodeTrace) -> None:
        self._trace = trace
        self._begun: dict[tuple[int, int], float] = {}

    def observe(self, event: str, fields: Mapping[str, Any], at: float, generation: int) -> Iterator[TraceSpan]:
        """Take an event of a generation; yield the spans that it ends."""
        generation = int(fields.get("made_in", generation))
        match event:
            case "checkpoint.written":
                yield self._written(fields, at, generation)
            case "checkpoint.committed" if fields.get("moved"):
                yield from self._committed(fields, at, generation)
            case "checkpoint.verified":
                start = at - float(fields["seconds"])
                about = {"step": fields["step"], "kind": fields["kind"]}
                yield self._trace.own("checkpoint.verify", generation, start, at, about)
            case "checkpoint.failed":
                about = {name: fields.get(name) for name in ("step", "age", "slot")}
                error = str(fields.get("error"))
                yield self._trace.own("checkpoint.failed", generation, at, at, about, error=error)
            case _:
                pass

    def forget(self, *, before: int) -> None:
        """Forget writes of checkpoints that were made in generations before this one and the last."""
        self._begun = {key: start for key, start in self._begun.items() if key[0] >= before - 1}

    def _written(self, fields: Mapping[str, Any], at: float, generation: int) -> TraceSpan:
        step, start = int(fields["step"]), at - float(fields["seconds"])
        key = (generation, step)
        self._begun[key] = min(start, self._begun.get(key, start))
        about = {name: fields.get(name) for name in ("step", "bytes", "new", "slot")}
        return self._trace.own("checkpoint.write", generation, start, at, about, parent=(CHECKPOINT, step))

    def _committed(self, fields: Mapping[str, Any], at: float, generation: int) -> Iterator[TraceSpan]:
        step, start = int(fields["step"]), at - float(fields["seconds"])
        about = {"step": step}
        begun = min(start, self._begun.pop((generation, step), start))
        for older in sorted(made for number, made in self._begun if number == generation and made < step):
            since, words = self._begun.pop((generation, older)), (CHECKPOINT, older)
            given_up = f"it was given up for step {step}"
            yield self._trace.shared(
                CHECKPOINT, generation, since, at, {"step": older}, words=words, parent=(ROOT,), error=given_up
            )
        yield self._trace.shared(CHECKPOINT, generation, begun, at, about, words=(CHECKPOINT, step), parent=(ROOT,))
        yield self._trace.own("checkpoint.commit", generation, start, at, about, parent=(CHECKPOINT, step))

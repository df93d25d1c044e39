"""Events of two nodes, as their keepers write them, and the spans that come of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from elastic3d.telemetry.span import TraceSpan
from elastic3d.telemetry.spans import SpanMaker

STEP = "step"
"""In a history, a step of the node's first trainer: (at, STEP, generation)."""

Line = tuple[float, str, dict[str, Any] | int]


def sealed(
    number: int, nodes: Sequence[str], *, cause: str = "start", leader: str = "a", **more: Any
) -> dict[str, Any]:
    """Return the fields of a sealed generation."""
    layout = {"pp": 1, "dp": len(nodes), "tp": 1, "zero": 3}
    return {
        "number": number, "cause": cause, "nodes": list(nodes), "spares": [], "layout": layout, "leader": leader,
        "detail": "", **more,
    }  # fmt: skip


def restored(generation: int, rank: int, **parts: float) -> dict[str, Any]:
    """Return the fields of a trainer that has its state. parts: seconds of each."""
    return {
        "generation": generation, "rank": rank, "slot": 0, "source": "memory", "step": 7,
        "parts": [[name, seconds, seconds / 2] for name, seconds in parts.items()],
    }  # fmt: skip


def trainer(generation: int, rank: int, **more: Any) -> dict[str, Any]:
    """Return the fields of a trainer's event."""
    return {"generation": generation, "rank": rank, "slot": 0, **more}


LOSS: dict[str, list[Line]] = {
    "a": [
        (100.0, "generation.sealed", sealed(1, "abc")),
        (100.1, "trainer.started", trainer(1, 0)),
        (101.0, "state.restored", restored(1, 0, script=0.25, loading=0.5)),
        (102.0, STEP, 1),
        (103.0, "checkpoint.written", {"step": 1, "made_in": 1, "bytes": 10, "new": 5, "seconds": 0.5, "slot": 0}),
        (103.5, "checkpoint.committed", {"step": 1, "made_in": 1, "moved": True, "seconds": 0.25}),
        (104.0, STEP, 1),
        (104.5, "peer.lost", {"peer": "c", "evidence": "refuses"}),
        (104.6, "generation.proposed", {"number": 2}),
        (104.7, "trainer.exited", trainer(1, 0, kind="peer_lost", step=2)),
        (105.0, "generation.sealed", sealed(2, "ab", cause="death")),
        (105.1, "trainer.started", trainer(2, 0)),
        (106.0, "state.restored", restored(2, 0, script=0.25, awaiting=0.25, loading=0.25)),
        (107.0, STEP, 2),
        (108.0, STEP, 2),
    ],
    "b": [
        (100.0, "generation.sealed", sealed(1, "abc")),
        (100.1, "trainer.started", trainer(1, 1)),
        (101.0, "state.restored", restored(1, 1, script=0.5)),
        (102.0, STEP, 1),
        (102.8, "checkpoint.written", {"step": 1, "made_in": 1, "bytes": 10, "new": 5, "seconds": 0.5, "slot": 0}),
        (104.0, STEP, 1),
        (104.7, "trainer.exited", trainer(1, 1, kind="crash", step=2, error="signal 6")),
        (105.0, "generation.sealed", sealed(2, "ab", cause="death")),
        (105.1, "trainer.started", trainer(2, 1)),
        (106.5, "state.restored", restored(2, 1, script=0.25, loading=0.75)),
        (107.0, STEP, 2),
    ],
}
"""A node of three dies; the others go on."""


def spans_of(run: str, node: str, lines: Iterable[Line], *, end: float | None = None) -> list[TraceSpan]:
    """Return the spans of one node's history. end: when its part in the job is over, None if it is not."""
    maker, spans = SpanMaker(run, node), []
    for at, event, fields in lines:
        if isinstance(fields, int):
            spans += maker.stepped(fields, at)
        else:
            spans += maker.observe(event, {"run": run, "node": node, **fields}, at)
    return spans + (maker.end(end) if end is not None else [])


def tree(spans: Sequence[TraceSpan]) -> str:
    """Return spans as a tree, children indented, in the order of their starts; a lost parent is shown as "?"."""
    ids = {span.id for span in spans}

    def below(parent: bytes, depth: int) -> list[str]:
        lines = []
        for span in sorted((one for one in spans if one.parent == parent), key=lambda one: (one.start, -one.end)):
            rank = span.attributes.get("elastic3d.rank")
            about = f" of rank {rank}" if rank is not None else ""
            failed = f" ({span.error})" if span.error else ""
            lines.append(f"{'  ' * depth}{span.name}{about} {span.start:.2f} to {span.end:.2f}{failed}")
            lines += below(span.id, depth + 1)
        return lines

    lost = [f"? {span.name}" for span in spans if span.parent and span.parent not in ids]
    return "\n".join([*below(b"", 0), *lost])

"""The spans of generations: each one's whole life, and what came before its first step, phase by phase."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from elastic3d.metrics.recovery import SIGNS, RecoveryWatch
from elastic3d.telemetry.span import BEGINNING, ROOT, NodeTrace, TraceSpan

RECOVERY = "recovery"
"""What the beginning of a generation is called by a node that trained before, and did not stand aside since."""


@dataclass(slots=True, kw_only=True)
class _Sealed:
    """A generation since it was sealed. begun: when what ended the one before it was noticed, or it was sealed.

    beginning: what that is called.
    """

    number: int
    beginning: str
    nodes: tuple[str, ...]
    spares: tuple[str, ...]
    leader: str
    begun: float
    sealed: float
    attributes: dict[str, Any]
    restored: float | None = None
    stepped: bool = False

    @property
    def members(self) -> tuple[str, ...]:
        return (*self.nodes, *self.spares)


class GenerationSpans:
    """Takes one node's events in their order. number: of the newest sealed generation, 0 before the first."""

    def __init__(self, trace: NodeTrace) -> None:
        self._trace, self._node = trace, trace.node
        self._watch = RecoveryWatch()
        self._now: _Sealed | None = None
        self._stepped_at: float | None = None
        self._sign_at: float | None = None

    @property
    def number(self) -> int:
        """Number of the newest sealed generation, 0 before the first."""
        return self._now.number if self._now is not None else 0

    def observe(self, event: str, fields: Mapping[str, Any], at: float) -> list[TraceSpan]:
        """Take an event; return the spans that it ends."""
        if event in SIGNS:
            self._watch.sign(at)
            self._sign_at = at if self._sign_at is None else self._sign_at
        if event == "generation.sealed":
            return list(self._sealed(fields, at))
        now = self._now
        of_first = now is not None and (fields.get("rank"), fields.get("generation")) == (0, now.number)
        if event == "state.restored" and now is not None and of_first:
            self._watch.restored(at)
            now.restored = at
        return []

    def stepped(self, generation: int, at: float) -> list[TraceSpan]:
        """Take a step of this node's first trainer."""
        now = self._now
        if now is not None and generation < now.number:
            # Heard of after the next one was sealed, which it does not begin.
            return []
        self._stepped_at, self._sign_at = at, None
        ended = self._watch.stepped(at)
        if now is None or now.number != generation or now.stepped:
            return []
        now.stepped = True
        if now.nodes[:1] != (self._node,):
            return []
        if ended is None:
            return list(self._beginning(now, at))
        start = at - ended.total
        spans = [self._begun(RECOVERY, now, start, at, kind=ended.kind)]
        for phase, seconds in ended.seconds.items():
            # Added up from the front, so that one ends where the next begins.
            spans.append(self._phase(f"{RECOVERY}.{phase}", now, start, start + seconds))
            start += seconds
        return spans

    def end(self, at: float) -> list[TraceSpan]:
        """Return what ends with this node's part in the job."""
        now, self._now = self._now, None
        if now is None:
            return []
        spans = list(self._unfinished(now, at))
        return [*spans, self._generation(now, at, "over")] if now.leader == self._node else spans

    def _sealed(self, fields: Mapping[str, Any], at: float) -> Iterator[TraceSpan]:
        leader = str(fields.get("leader") or "")
        names: list[tuple[str, ...]] = [tuple(map(str, fields.get(key) or ())) for key in ("nodes", "spares")]
        former, begun = self._now, at
        if former is not None:
            yield from self._unfinished(former, at)
            known = [name for name in (leader, *names[0], *names[1]) if name in former.members]
            if known[:1] == [self._node]:
                yield self._generation(former, at, "over" if former.stepped else "superseded")
            if self._node in former.nodes:
                marks = [self._stepped_at if former.stepped else former.begun, self._sign_at]
                begun = min([at, *(mark for mark in marks if mark is not None)])
            else:
                # A node that stood aside has heard of no step: what it has noticed since may be of hours ago.
                self._stepped_at = self._sign_at = None
        self._watch.sealed(str(fields.get("cause") or ""), at, trains=self._node in names[0])
        layout = fields.get("layout") or {}
        self._now = _Sealed(
            number=int(fields["number"]),
            beginning=RECOVERY if self._stepped_at is not None else BEGINNING,
            nodes=names[0],
            spares=names[1],
            leader=leader,
            begun=begun,
            sealed=at,
            attributes={
                "cause": fields.get("cause"),
                "detail": fields.get("detail"),
                "nodes": list(names[0]),
                "spares": list(names[1]),
                "leader": leader,
                **{f"layout.{axis}": size for axis, size in layout.items()},
            },
        )

    def _unfinished(self, now: _Sealed, at: float) -> Iterator[TraceSpan]:
        """Yield the beginning of a generation that ends before its first step: others hang their spans under it."""
        if not now.stepped and now.nodes[:1] == (self._node,):
            yield self._begun(now.beginning, now, now.begun, at, error="the generation ended before its first step")

    def _beginning(self, now: _Sealed, at: float) -> Iterator[TraceSpan]:
        """Yield the beginning of a generation as a node has it that did not train before."""
        name = now.beginning
        yield self._begun(name, now, now.begun, at)
        if now.begun < now.sealed:
            yield self._phase(f"{name}.seal", now, now.begun, now.sealed)
        if now.restored is not None:
            yield self._phase(f"{name}.restore", now, now.sealed, now.restored)
            yield self._phase(f"{name}.first_step", now, now.restored, at)

    def _generation(self, now: _Sealed, at: float, outcome: str) -> TraceSpan:
        about = {**now.attributes, "outcome": outcome}
        return self._trace.shared(ROOT, now.number, now.begun, at, about, words=(ROOT,))

    def _begun(self, name: str, now: _Sealed, start: float, at: float, *, error: str = "", kind: str = "") -> TraceSpan:
        about, words = {"cause": now.attributes["cause"], "kind": kind}, (BEGINNING,)
        return self._trace.shared(name, now.number, start, at, about, words=words, parent=(ROOT,), error=error)

    def _phase(self, name: str, now: _Sealed, start: float, end: float) -> TraceSpan:
        return self._trace.own(name, now.number, start, end, {}, parent=(BEGINNING,))

"""What a span is, and how all nodes of a job name the same ones without a word between them.

A generation is a trace. Its id, and those of spans that several nodes hang theirs under, are digests of the run's id
and the generation's number: each node knows both. One node alone sends such a span; what others send joins it by its
id. All other spans have a node's name in theirs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Attribute = str | bool | int | float | Sequence[str] | Sequence[int]

ROOT, BEGINNING = "generation", "beginning"
"""Spans that are one for all nodes: the generation's, and what comes before its first step. See also `CHECKPOINT`."""

CHECKPOINT = "checkpoint"

LONGEST, MOST = 2000, 1000
"""Characters of a text, and members of a list, that an attribute keeps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSpan:
    """Something that took time. trace: 16 bytes; id, parent: 8 bytes, a parent of b"" for none.

    start, end: wall clock of the node that sends it, in seconds since the epoch. error: why it failed, "" otherwise.
    """

    name: str
    trace: bytes
    id: bytes
    parent: bytes
    start: float
    end: float
    attributes: Mapping[str, Attribute]
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """The trace of one generation of a run."""

    run: str
    generation: int

    @property
    def id(self) -> bytes:
        """The same on every node. 16 bytes."""
        return _digest(16, self.run, self.generation)

    def span(self, *words: str | int) -> bytes:
        """Return the id of the span with these words, the same wherever they are said. 8 bytes."""
        return _digest(8, self.run, self.generation, *words)


def _digest(size: int, *words: str | int) -> bytes:
    # Lengths, so that no two lists of words are the same bytes.
    texts = [str(word).encode("utf-8", "surrogatepass") for word in ("elastic3d", *words)]
    data = b"".join(len(text).to_bytes(8, "big") + text for text in texts)
    digest = hashlib.sha256(data).digest()[:size]
    # All zeros mean no id.
    return digest if any(digest) else b"\1" * size


class NodeTrace:
    """Makes one node's spans, of any generation of a run.

    Spans that are one for all nodes are named by words alone; of others the node, its life, and a number of its own are
    part of the id.
    """

    def __init__(self, run: str, node: str, life: str = "") -> None:
        self.run, self.node, self._life = run, node, life
        self._made = 0

    def shared(
        self,
        name: str,
        generation: int,
        start: float,
        end: float,
        about: Mapping[str, Any],
        *,
        words: Sequence[str | int],
        parent: Sequence[str | int] = (),
        error: str = "",
    ) -> TraceSpan:
        """Return the span that these words name on every node. parent: the words of the one above, () for none.

        about: fields of events, which become attributes.
        """
        trace = Trace(run=self.run, generation=generation)
        return self._span(name, trace, trace.span(*words), parent, start, end, error, about)

    def own(
        self,
        name: str,
        generation: int,
        start: float,
        end: float,
        about: Mapping[str, Any],
        *,
        parent: Sequence[str | int] | bytes = (ROOT,),
        error: str = "",
    ) -> TraceSpan:
        """Return a span of this node alone. parent: the words, or the id, of the one above. about: as above."""
        trace, self._made = Trace(run=self.run, generation=generation), self._made + 1
        return self._span(name, trace, trace.span(self.node, self._life, self._made), parent, start, end, error, about)

    def _span(
        self,
        name: str,
        trace: Trace,
        id: bytes,
        parent: Sequence[str | int] | bytes,
        start: float,
        end: float,
        error: str,
        about: Mapping[str, Any],
    ) -> TraceSpan:
        above = parent if isinstance(parent, bytes) else trace.span(*parent) if parent else b""
        return TraceSpan(
            name=name,
            trace=trace.id,
            id=id,
            parent=above,
            # A wall clock that was set back is not to make a span of less than no time.
            start=min(start, end),
            end=end,
            attributes=plain({"generation": trace.generation, **about}),
            error=error[:LONGEST],
        )


def plain(fields: Mapping[str, Any]) -> dict[str, Attribute]:
    """Return fields of an event as attributes: what is not known is left out, what is no plain value becomes text."""
    return {f"elastic3d.{name}": _attribute(value) for name, value in fields.items() if value not in (None, "", [], ())}


def _attribute(value: Any) -> Attribute:
    if isinstance(value, bool | int | float):
        return value if not isinstance(value, int) or abs(value) < 1 << 63 else str(value)
    if isinstance(value, list | tuple) and (
        all(isinstance(one, str) for one in value) or all(type(one) is int for one in value)
    ):
        return [one if isinstance(one, int) else one[:LONGEST] for one in value[:MOST]]
    return str(value)[:LONGEST]

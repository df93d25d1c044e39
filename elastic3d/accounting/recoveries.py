"""What came before the first step of each generation, as the node that has its rank 0 spent it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from elastic3d.accounting.past_run import PastGeneration, PastRun
from elastic3d.accounting.spans import Category, Span


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """The time before a generation's first step. node: whose it was. spans: in order, never empty."""

    generation: PastGeneration
    node: str
    spans: tuple[Span, ...]

    @property
    def start(self) -> int:
        """When it began, in microseconds since the epoch."""
        return self.spans[0].start

    @property
    def stop(self) -> int:
        """When it ended."""
        return self.spans[-1].stop


def recoveries(run: PastRun, spans: Mapping[str, Sequence[Span]]) -> Iterator[Recovery]:
    """Yield the recoveries and changes of a run, in order; of a generation of which nothing is known, none."""
    reached = 0
    for generation in run.generations:
        first = generation.steps[0].at if generation.steps else None
        node = next((node for node in generation.nodes if node in spans), "")
        charged = tuple(
            span
            for span in (spans[node] if node else ())
            if span.cause == generation.index and (first is None or span.start < first)
            # Steps that are made again were made long before.
            if span.category is not Category.REPEATED or span.start >= reached
        )
        if charged:
            yield Recovery(generation=generation, node=node, spans=charged)
        reached = max(reached, generation.steps[-1].at if generation.steps else 0)

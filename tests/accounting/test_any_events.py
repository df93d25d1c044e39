"""Whatever files say, every microsecond of every node is in one category, and a timeline nests."""

from __future__ import annotations

import itertools
import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from elastic3d.accounting.past_run import FAILED_EXITS, SILENT
from elastic3d.accounting.spans import Category, Span, paint
from elastic3d.accounting.trace import trace
from elastic3d.log import EVENTS
from tests.accounting.written import EPOCH, account, assert_nested

NODES = ("a", "b", "c")
NAMES = (
    "node.started",
    "member.joined",
    "member.fenced",
    "generation.sealed",
    "generation.sealed",
    "generation.proposed",
    "trainer.started",
    "state.restored",
    "step.committed",
    "step.committed",
    "step.committed",
    "snapshot.held",
    "trainer.exited",
    "peer.lost",
    "rank.stuck",
    "node.slow",
    "node.well",
    "node.draining",
    "nodes.awaited",
    "checkpoint.verified",
    "job.ended",
    *SILENT,
)
members = st.lists(st.sampled_from(NODES), unique=True)
number = st.integers(0, 6)
seconds = st.floats(0, 20) | st.integers(0, 3)
garbage = st.none() | st.booleans() | st.text(max_size=3) | st.floats() | st.integers() | st.lists(st.integers())
part = st.tuples(st.sampled_from(("building", "awaiting", "loading", "x")), seconds, seconds).map(list)
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "generation": number,
    "number": number,
    "attempt": number,
    "rank": number,
    "slot": st.integers(0, 1),
    "step": number,
    "since": number,
    "nodes": members,
    "ranks": st.lists(number, max_size=2),
    "spares": members,
    "peer": st.sampled_from(NODES),
    "kind": st.sampled_from(("done", "left", "data", "compute", *FAILED_EXITS)),
    "act": st.booleans(),
    "parts": st.lists(part | garbage, max_size=4),
    "seconds": seconds,
    "data": seconds,
    "copy": seconds,
    "cost": seconds,
    "cause": st.sampled_from(("start", "death")),
}


@st.composite
def events(draw: st.DrawFn) -> str:
    line: dict[str, Any] = {"event": draw(st.sampled_from(NAMES) | st.sampled_from(sorted(EVENTS)))}
    # Times that are close to each other, so that what is written meets, and equal ones.
    line["at"] = EPOCH + draw(st.integers(0, 30) | st.floats(0, 30)) * draw(st.sampled_from((1.0, 1.0, 0.1)))
    for name, values in FIELDS.items():
        if draw(st.integers(0, 9)) < 8:
            line[name] = draw(values)
        elif draw(st.booleans()):
            line[name] = draw(garbage)
    return json.dumps(line)


files = st.dictionaries(st.sampled_from(NODES), st.lists(events(), min_size=1, max_size=25), min_size=1)


@given(files, st.booleans())
def test_categories_add_up_to_the_time_from_the_first_event_to_the_last(
    lines: dict[str, list[str]], in_order: bool
) -> None:
    """To the microsecond, without a gap, an overlap or anything negative; and so do what generations cost."""
    if in_order:
        lines = {node: sorted(mine, key=lambda line: json.loads(line)["at"]) for node, mine in lines.items()}
    run, spans, result = account(lines)
    for node in result.nodes:
        own = [life for life in run.lives if life.node == node.node]
        assert sum(node.by_category.values()) == node.microseconds
        assert node.microseconds == max(life.last for life in own) - min(life.first for life in own)
        mine = spans[node.node]
        assert all(one.length > 0 for one in mine)
        assert all(one.stop == after.start for one, after in itertools.pairwise(mine))
    assert all(value >= 0 for value in result.by_category.values())
    assert sum(result.by_category.values()) == sum(node.microseconds for node in result.nodes)
    for generation in result.generations:
        assert sum(generation.by_category.values()) == generation.microseconds
    for category in Category:
        assert sum(one.by_category.get(category, 0) for one in result.generations) <= result.by_category[category]
    assert 0.0 <= result.goodput <= 1.0
    assert 0.0 <= result.effective_training_time_ratio <= 1.0


@given(files)
def test_slices_of_a_timeline_nest(lines: dict[str, list[str]]) -> None:
    """Perfetto reports those that overlap as errors, and does not show them where they belong."""
    run, spans, _ = account(lines)
    assert_nested(json.loads(json.dumps(list(trace(run, spans)))))


edge = st.integers(0, 40)
layer = st.lists(st.tuples(edge, edge, st.sampled_from(list(Category)[:4])), max_size=8).map(
    lambda parts: [Span(min(a, b), max(a, b), category) for a, b, category in parts]
)


@given(st.lists(layer, max_size=4))
def test_what_is_painted_covers_what_was_there(layers: list[list[Span]]) -> None:
    """And nothing beyond it; at each moment the last layer that covers it counts."""
    spans = [Span(5, 35, Category.UNKNOWN)]
    for one in layers:
        spans = paint(spans, one)
    assert [spans[0].start, spans[-1].stop] == [5, 35]
    assert all(one.stop == after.start for one, after in itertools.pairwise(spans))
    for moment in range(5, 35):
        here = next(span.category for span in spans if span.start <= moment < span.stop)
        covering = [one for one in layers if any(span.start <= moment < span.stop for span in one)]
        assert (here is Category.UNKNOWN) == (not covering)
        if covering:
            over = [span for span in covering[-1] if span.start <= moment < span.stop]
            assert here in {span.category for span in over}

"""What became of the time of a run's nodes: sums over its spans, exact to the microsecond, and shares of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from elastic3d.accounting.clock_offsets import ClockOffset
from elastic3d.accounting.node_spans import step_spans
from elastic3d.accounting.past_run import PastGeneration, PastRun
from elastic3d.accounting.spans import Category, Span

CHARGED = (
    Category.REPEATED,
    Category.NOTICING,
    Category.FORMING,
    Category.PREPARING,
    Category.RESTORING,
    Category.WAITING,
)
"""What a generation costs: all that is spent until its first step, and the steps that it makes again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGoodput:
    """What the time of one node went to."""

    node: str
    """Its name."""
    first: float
    """Its first event, in seconds since the epoch, by the clock of the node to which all are compared."""
    microseconds: int
    """From its first event to its last: the sum of its categories."""
    by_category: Mapping[Category, int]
    """Microseconds in each category, 0 where there are none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationGoodput:
    """What a generation cost: all that was spent for it before its first step, and the steps that it made again."""

    number: int
    """The generation's number."""
    start: int
    """Which start of the run it belongs to, from 0: a run that is started again may count from 1 again."""
    cause: str
    """Why it came to be, "" where its sealing is not in the files."""
    detail: str
    """The same in words."""
    nodes: tuple[str, ...]
    """Its active nodes, in rank order."""
    gone: tuple[str, ...]
    """Nodes that the generation before had, and this one has not."""
    come: tuple[str, ...]
    """Nodes that it has, and the generation before had not."""
    steps: int
    """Steps that it made."""
    steps_repeated: int
    """Steps of earlier generations that were lost to it."""
    inferred: bool
    """Its steps are known by their snapshots only: the file of the node that wrote them down is not there."""
    microseconds: int
    """Node-microseconds in all: the sum of its categories."""
    by_category: Mapping[Category, int]
    """Node-microseconds in each of the categories that a generation may cost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """What became of the time of a run's nodes."""

    run: str
    """torchrun's `--rdzv-id`."""
    first: float
    """The first event, in seconds since the epoch."""
    microseconds: int
    """From the first event of any node to the last."""
    steps: int
    """Steps that count."""
    goodput: float
    """Share of the time that nodes were held for which went to steps that count."""
    effective_training_time_ratio: float
    """Share of the time from the first event to the last in which steps that count were made."""
    held: int
    """Node-microseconds that nodes were held: all but `away`."""
    by_category: Mapping[Category, int]
    """Node-microseconds in each category."""
    generations: tuple[GenerationGoodput, ...]
    """What each generation cost, in order."""
    nodes: tuple[NodeGoodput, ...]
    """What the time of each node went to."""
    clocks: tuple[ClockOffset, ...]
    """How the clocks of the nodes differ."""
    other_runs: tuple[str, ...] = ()
    """Other runs whose events are in the same folder."""
    remarks: tuple[str, ...] = ()
    """What was missing or could not be read."""


def goodput(
    name: str,
    run: PastRun,
    spans: Mapping[str, Sequence[Span]],
    clocks: Sequence[ClockOffset],
    *,
    other_runs: Sequence[str] = (),
    remarks: Sequence[str] = (),
) -> Goodput:
    """Return the sums of a run's spans. spans: of all nodes, from `node_spans`."""
    nodes = tuple(_node(node, run, spans[node]) for node in run.nodes)
    total: Counter[Category] = Counter()
    for one in nodes:
        total.update(one.by_category)
    by_cause: Counter[tuple[int, Category]] = Counter()
    for mine in spans.values():
        for span in mine:
            by_cause[span.cause, span.category] += span.length
    held = total.total() - total[Category.AWAY]
    made = [step for generation in run.generations for step in generation.steps if step.lost_to < 0]
    training = sum(
        span.length
        for generation in run.generations
        for span in step_spans(generation)
        if span.category is Category.USEFUL
    )
    length = run.last - run.first
    return Goodput(
        run=name,
        first=run.first / 1e6,
        microseconds=length,
        steps=len(made),
        goodput=total[Category.USEFUL] / held if held else 0.0,
        effective_training_time_ratio=min(1.0, training / length) if length else 0.0,
        held=held,
        by_category=_whole(total),
        generations=tuple(_generation(one, run, by_cause) for one in run.generations),
        nodes=nodes,
        clocks=tuple(clocks),
        other_runs=tuple(other_runs),
        remarks=tuple(remarks),
    )


def _whole(counted: Mapping[Category, int]) -> dict[Category, int]:
    return {category: counted.get(category, 0) for category in Category}


def _node(node: str, run: PastRun, spans: Sequence[Span]) -> NodeGoodput:
    own = [life for life in run.lives if life.node == node]
    first, last = min(life.first for life in own), max(life.last for life in own)
    by_category: Counter[Category] = Counter()
    for span in spans:
        by_category[span.category] += span.length
    assert by_category.total() == last - first, f"the spans of {node} do not add up"
    return NodeGoodput(node=node, first=first / 1e6, microseconds=last - first, by_category=_whole(by_category))


def _generation(
    generation: PastGeneration, run: PastRun, by_cause: Mapping[tuple[int, Category], int]
) -> GenerationGoodput:
    costs = {category: by_cause.get((generation.index, category), 0) for category in CHARGED}
    return GenerationGoodput(
        number=generation.number,
        start=generation.start,
        cause=generation.cause,
        detail=generation.detail,
        nodes=generation.nodes,
        gone=generation.gone,
        come=generation.come,
        steps=len(generation.steps),
        steps_repeated=sum(step.lost_to == generation.index for one in run.generations for step in one.steps),
        inferred=generation.inferred,
        microseconds=sum(costs.values()),
        by_category=costs,
    )


def missing(run: PastRun, clocks: Sequence[ClockOffset]) -> list[str]:
    """Return what is not in a run's events though it happened, in words."""
    remarks = []
    for generation in run.generations:
        if generation.formed is None:
            remarks.append(f"no file has the sealing of generation {generation.number}: its nodes are those that wrote")
        absent = sorted({*generation.nodes} - {*run.nodes})
        if absent:
            remarks.append(f"generation {generation.number} had {', '.join(absent)}, whose events are not there")
        if generation.inferred:
            remarks.append(f"the steps of generation {generation.number} are known by their snapshots only")
    if len(clocks) > 1:
        lone = [clock.node for clock in clocks if not clock.moments]
        if lone:
            remarks.append(f"the clocks of {', '.join(lone)} could not be compared, and count as equal to the others'")
    reset = sorted({life.node for life in run.lives if life.set_back})
    if reset:
        remarks.append(f"the clock of {', '.join(reset)} was set back meanwhile: times are by the order of the lines")
    cut = sorted({life.node for life in run.lives if not life.whole})
    if cut:
        remarks.append(f"the first events of {', '.join(cut)} are gone: the file was full, or is not whole")
    return remarks

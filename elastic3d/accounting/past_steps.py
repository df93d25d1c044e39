"""The steps of a past generation, what nodes waited for in them, and what slow ranks cost them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from elastic3d.accounting.recorded_events import RecordedEvent, span_of

DATA_KIND = "data"
"""The kind of `node.slow` for ranks whose samples come late."""

TOGETHER = 8
"""Steps that one `steps.waited` is about, up to a multiple of as many."""

LONGEST = 1024
"""Steps that one may be about, at most, to be believed."""


NodeWaits = tuple[int, int, int]
"""Microseconds of a step in which a node waited for data, for the copy of a snapshot, and for slow ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PastWaits:
    """What each of the steps `first` to `last` was to the nodes. others: to all that are not in `apart`, on average."""

    first: int
    last: int
    others: NodeWaits
    apart: Mapping[str, NodeWaits]

    @property
    def steps(self) -> int:
        """How many steps these are."""
        return self.last - self.first + 1

    def of(self, node: str) -> NodeWaits:
        """Return what a node waited for in each of them; "" for what most did."""
        return self.apart.get(node, self.others)


@dataclass(frozen=True, slots=True, kw_only=True)
class PastStep:
    """A step that was made. at: when it was committed. length, data, copy: of it, and of its waits for data and for the
    copy of a snapshot as rank 0 measured them, in microseconds. lost_to: index of the generation that went back behind
    it, -1 if it counts. silent: somebody stood still in it. waits: what all nodes waited for, None where only `data`
    and `copy` are known.
    """

    step: int
    at: int
    length: int
    data: int = 0
    copy: int = 0
    lost_to: int = -1
    silent: bool = False
    waits: PastWaits | None = None
    event: RecordedEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class PastSlowness:
    """Slow ranks of a generation, and what they cost each step from one to another, in microseconds."""

    nodes: tuple[str, ...]
    data: bool
    cost: int
    since: int
    until: int | None = None


def slowed(before: Sequence[PastSlowness], event: RecordedEvent) -> list[PastSlowness]:
    """Return the slow ranks of a generation, after one more `node.slow` or `node.well`."""
    ranks = event.fields.get("ranks")
    kept = []
    for one in before:
        same = one.nodes == event.names("nodes") and one.data == (event.text("kind") == DATA_KIND)
        if same and one.until is None:
            one = PastSlowness(
                nodes=one.nodes, data=one.data, cost=one.cost, since=one.since, until=event.whole("step")
            )
        kept.append(one)
    if event.name == "node.slow" and ranks:
        kept.append(
            PastSlowness(
                nodes=event.names("nodes"),
                data=event.text("kind") == DATA_KIND,
                cost=event.span("cost"),
                since=event.whole("since") or event.whole("step") or 0,
            )
        )
    return kept


def waits_of(event: RecordedEvent) -> PastWaits | None:
    """Return what a `steps.waited` says, None where it is not whole."""
    first, last, apart = event.whole("first"), event.whole("last"), event.fields.get("apart")
    if not first or last is None or not first <= last < first + LONGEST:
        return None
    named = {
        one[0]: (span_of(one[1]), span_of(one[2]), span_of(one[3]))
        for one in (apart if isinstance(apart, list) else ())
        if isinstance(one, list) and len(one) == 4 and isinstance(one[0], str)
    }
    others = (event.span("data"), event.span("saving"), event.span("slow"))
    return PastWaits(first=first, last=last, others=others, apart=named)


def made_steps(
    commits: Sequence[RecordedEvent], silent: Sequence[int], waits: Iterable[PastWaits] = ()
) -> list[PastStep]:
    """Return the steps that were committed, in order. silent: when ranks stood still, in order."""
    made: list[PastStep] = []
    place = 0
    waited = {step: one for one in waits for step in range(one.first, one.last + 1)}
    for event in sorted(commits, key=lambda event: (event.at, event.whole("step") or 0)):
        length = event.span("seconds")
        begun = made[-1].at if made else event.at - length
        while place < len(silent) and silent[place] <= begun:
            place += 1
        made.append(
            PastStep(
                step=event.whole("step") or 0,
                at=event.at,
                length=length,
                data=event.span("data"),
                copy=event.span("copy"),
                silent=place < len(silent) and silent[place] <= event.at,
                waits=waited.get(event.whole("step") or 0),
                event=event,
            )
        )
    return made


def hold(held: dict[int, RecordedEvent], event: RecordedEvent) -> None:
    """Keep the first of a step's snapshots."""
    step = event.whole("step") or 0
    if step not in held or event.at < held[step].at:
        held[step] = event


def inferred_steps(held: Iterable[RecordedEvent]) -> list[PastStep]:
    """Return the steps whose snapshots others held: the file of the node that wrote the steps down is not there."""
    made: list[PastStep] = []
    for event in sorted(held, key=lambda event: event.at):
        length = event.at - made[-1].at if made else 0
        made.append(PastStep(step=event.whole("step") or 0, at=event.at, length=length, event=event))
    return made

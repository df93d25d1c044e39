"""Where the time of a job's nodes goes, as one keeper sees it while the job runs. Pure.

A keeper hears of every generation, and of each step that its own trainers make: all ranks make the same. What its
trainers are at counts for all active nodes, since none goes on without the others; how many there are, and how many
spares, newcomers and leavers beside them, the generations and the membership say. So the account needs no file of any
node, and takes a few sums.

Active nodes are accounted for from one mark to the next, the sealing of a generation or the end of a step, when it is
known what the time between went to; all other nodes as time passes. All times are whole microseconds of one clock.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from elastic3d.accounting.live_record import GoodputRecord, StepStretch
from elastic3d.accounting.node_spans import PARTS
from elastic3d.accounting.past_run import FAILED_EXITS, SILENT
from elastic3d.accounting.past_steps import TOGETHER, PastSlowness, slowed, waits_of
from elastic3d.accounting.recorded_events import RecordedEvent, span_of
from elastic3d.accounting.spans import Category, Span, paint

HEARD = frozenset(
    {
        "generation.sealed",
        "state.restored",
        "step.committed",
        "steps.waited",
        "trainer.exited",
        "peer.lost",
        "node.slow",
        "node.well",
        "nodes.awaited",
        *SILENT,
    }
)
"""Events that change an account."""

STRETCHES = 32
"""Stretches of steps that are kept apart; the oldest are put together."""

AWAITED = 4
"""Stretches of `TOGETHER` steps of the present generation that are kept apart: what was waited in them comes later."""

RECENT = 9
"""Steps of whose lengths the median is a usual one."""

_AFTER_LOSS = (Category.NOTICING, Category.FORMING, Category.WAITING)
"""What nodes that are lost take no part in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesOutside:
    """How many nodes are there from `at` on that the sealed generation does not have: newcomers, and former members."""

    at: int
    joining: int
    leaving: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTold:
    """The newest step at `at`, as a keeper without trainers is told it now and then."""

    at: int
    generation: int
    step: int


Input = RecordedEvent | NodesOutside | StepTold


class LiveAccount:
    """The account of one run. node: whose keeper it is; its trainers are those that it hears of."""

    def __init__(self, node: str) -> None:
        self._node = node
        self._sums: Counter[str] = Counter()
        self._by_cause: dict[str, Counter[str]] = defaultdict(Counter)
        self._steps = 0
        self._number, self._step, self._cause = 0, -1, ""
        self._names: frozenset[str] = frozenset()
        self._active = self._spares = self._joining = self._leaving = 0
        self._trains = False
        self._stretches: list[StepStretch] = []
        self._recent: tuple[int, ...] = ()
        self._first = -1
        self._slowness: tuple[PastSlowness, ...] = ()
        self._at: int | None = None
        self._reached = 0
        self._parts: list[Span] = []
        self._failed: int | None = None
        self._awaited: int | None = None
        self._lost = self._left = self._done = self._silent = False
        self._marked = GoodputRecord()

    @classmethod
    def resumed(cls, record: GoodputRecord, node: str, at: int, names: Iterable[str]) -> LiveAccount:
        """Return the account that another keeper left, as of the record's moment, which was `at` by this one's clock.

        names: of the active nodes of the record's generation, as far as they are known.
        """
        account = cls(node)
        account._sums.update(record.settled)
        for cause, table in record.by_cause.items():
            account._by_cause[cause].update(table)
        account._steps, account._number, account._step = record.steps, record.number, record.step
        account._cause, account._active, account._spares = record.cause, record.active, record.spares
        account._joining, account._leaving = record.joining, record.leaving
        account._names = frozenset(names)
        account._trains = node in account._names
        account._stretches, account._recent = list(record.stretches), record.recent
        account._first, account._slowness = record.first, record.slowness
        account._at = account._reached = at
        account._marked = GoodputRecord(since=record.since)
        account._mark()
        return account

    @property
    def number(self) -> int:
        """The sealed generation's number, 0 before the first."""
        return self._number

    @property
    def trains(self) -> bool:
        """Whether the node's own trainers take part in that generation."""
        return self._trains

    def take(self, said: Input) -> None:
        """Take in an event of the keeper's own journal, or how many nodes are outside; times never go back."""
        at = said.at if self._at is None else max(said.at, self._at)
        self._pass(at)
        if isinstance(said, NodesOutside):
            self._joining, self._leaving = said.joining, said.leaving
            return
        if isinstance(said, StepTold):
            others = not self._trains and said.generation == self._number and self._failed is None
            if others and said.step > max(0, self._step):
                self._follow(said.step, at)
            return
        own = self._trains and said.generation == self._number
        match said.name:
            case "generation.sealed" if said.whole("number") and said.names("nodes"):
                self._seal(said, at)
            case "state.restored" if own:
                self._restore(said, at)
            case "step.committed" if own and (said.whole("step") or 0) > max(0, self._step):
                self._commit(said, at)
            case "steps.waited" if own:
                self._divide(said)
            case "trainer.exited" if own:
                self._exit(said.text("kind"), at)
            case "peer.lost" if said.text("peer") in self._names:
                self._fail(at, lost=True)
            case "node.slow" | "node.well" if own:
                self._slowness = tuple(slowed(self._slowness, said))
            case "nodes.awaited" if self._awaited is None:
                self._awaited = at
            case name if name in SILENT and own:
                self._silent = True
                if name == "rank.stuck" and said.says("act"):
                    self._fail(at, lost=True)
            case _:
                pass

    def record(self, now: int, wall: float) -> GoodputRecord:
        """Return what there is to write at `now`. wall: the wall clock."""
        at = now if self._at is None else max(now, self._at)
        self._pass(at)
        sums = Counter(self._sums)
        for span in self._under_way(at):
            sums[span.category] += self._active * span.length
        self._marked = replace(self._marked, since=self._marked.since or wall)
        return replace(self._marked, at=wall, by_category=_table(sums))

    # What passes, and what it went to.

    def _forget(self) -> None:
        """Forget what was heard since the last mark of how the generation begins or ends."""
        self._parts, self._failed, self._awaited = [], None, None
        self._lost = self._left = self._done = self._silent = False

    def _pass(self, at: int) -> None:
        """Account for the nodes that do not train, up to `at`."""
        before = at if self._at is None else self._at
        self._at = at
        waited = 0 if self._awaited is None else at - max(before, self._awaited)
        for category, nodes in ((Category.SPARE, self._spares), (Category.JOINING, self._joining)):
            self._spend(category, nodes * (at - before - waited))
            self._spend(Category.WAITING, nodes * waited)
        self._spend(Category.LEAVING, self._leaving * (at - before))

    def _spend(self, category: Category, spent: int, cause: str = "") -> None:
        self._sums[category] += spent
        if cause:
            self._by_cause[cause][category] += spent

    def _move(self, category: str, to: Category, spent: int) -> None:
        """Put time that was accounted for before where it belongs, on account of the present generation."""
        spent = min(spent, self._sums[category])
        self._sums[category] -= spent
        self._spend(to, spent, self._cause)

    @property
    def _usual(self) -> int:
        return round(statistics.median(self._recent)) if self._recent else 0

    def _mark(self) -> None:
        self._marked = GoodputRecord(
            since=self._marked.since,
            by_cause={cause: _table(table) for cause, table in self._by_cause.items()},
            steps=self._steps,
            number=self._number,
            step=self._step,
            cause=self._cause,
            active=self._active,
            spares=self._spares,
            joining=self._joining,
            leaving=self._leaving,
            by_category=_table(self._sums),
            settled=_table(self._sums),
            stretches=tuple(self._stretches),
            recent=self._recent,
            first=self._first,
            slowness=self._slowness,
        )

    # Generations.

    def _seal(self, event: RecordedEvent, at: int) -> None:
        names = frozenset(event.names("nodes"))
        number, cause = event.whole("number") or 0, event.text("cause") or "start"
        if number <= self._number:
            return
        failed = self._failed is not None
        stayed = len(self._names & names) if self._names else min(self._active, len(names))
        for span in self._ended(at):
            there = stayed if failed and span.category in _AFTER_LOSS else self._active
            own = span.category in (Category.PREPARING, Category.RESTORING)
            charged = "" if span.category in (Category.UNKNOWN, Category.SAVING) else self._cause if own else cause
            self._spend(span.category, there * span.length, charged)
        self._number, self._step, self._cause = number, -1, cause
        self._names, self._active, self._spares = names, len(names), len(event.names("spares"))
        self._trains = self._node in names
        self._reached, self._first, self._slowness = at, -1, ()
        self._forget()
        self._mark()

    def _ended(self, until: int) -> list[Span]:
        """Return what active nodes were at since the last mark, if their generation ends at `until`."""
        reached = self._reached
        if not self._active or until <= reached:
            return []
        if self._done:
            return [Span(reached, until, Category.SAVING)]
        failed = None if self._failed is None else max(reached, min(self._failed, until))
        if not self._trains:
            spans = [Span(reached, until if failed is None else failed, Category.UNKNOWN)]
        elif self._step < 0:
            spans = self._beginning(until if failed is None else failed)
        elif failed is None:
            spans = []
        else:
            # Whoever was lost made at most one more step.
            alive = min(failed, reached + self._usual) if self._lost else failed
            spans = [Span(reached, alive, Category.REPEATED), Span(alive, failed, Category.NOTICING)]
        end = spans[-1].stop if spans else reached
        forming = paint([Span(end, until, Category.FORMING)], self._waiting(until)) if end < until else []
        return [span for span in [*spans, *forming] if span.length > 0]

    def _waiting(self, until: int) -> list[Span]:
        return [] if self._awaited is None else [Span(self._awaited, until, Category.WAITING)]

    def _beginning(self, until: int) -> list[Span]:
        """Return what the trainers of a generation were at from its sealing on."""
        return paint([Span(self._reached, until, Category.PREPARING)], self._parts)

    def _restore(self, event: RecordedEvent, at: int) -> None:
        parts = event.fields.get("parts")
        named = [part for part in parts if isinstance(part, list) and len(part) > 1] if isinstance(parts, list) else []
        began = at - sum(span_of(part[1]) for part in named)
        self._parts = []  # of several slots, the others wait for the last
        for name, seconds, *_ in named:
            stop = began + span_of(seconds)
            self._parts.append(Span(began, stop, PARTS.get(str(name), Category.PREPARING)))
            began = stop
        if event.whole("step") is not None:
            self._go_back(event.whole("step") or 0)

    def _exit(self, kind: str, at: int) -> None:
        if kind in FAILED_EXITS:
            self._fail(at, lost=kind == "peer_lost")
        self._left |= kind == "left"
        self._done |= kind == "done"

    def _fail(self, at: int, *, lost: bool) -> None:
        self._failed = at if self._failed is None else min(self._failed, at)
        self._lost |= lost

    # Steps.

    def _commit(self, event: RecordedEvent, at: int) -> None:
        step, active = event.whole("step") or 0, self._active
        usual, length = self._usual, max(0, at - self._reached)
        costs: Counter[str] = Counter()
        if self._step < 0:
            self._go_back(step - 1)
            made = min(length, event.span("seconds"))
            useful = min(made, usual) if usual else made
            spans = [Span(at - made, at - useful, Category.PREPARING), Span(at - useful, at, Category.USEFUL)]
            for span in paint(self._beginning(at), spans):
                if span.category is not Category.USEFUL:
                    self._spend(span.category, active * span.length, self._cause)
            costs[Category.USEFUL] = active * useful
            self._first, self._recent = useful, ()
        else:
            costs = self._split(event, length, usual)
            self._recent = (*self._recent[-RECENT + 1 :], length)
            if self._first > length:
                # The first step compiled, or connected: as much as it took beyond the second was no step.
                self._move(Category.USEFUL, Category.PREPARING, active * (self._first - length))
                self._lengthen(step - 1, Counter({Category.USEFUL.value: -active * (self._first - length)}))
            self._first = -1
        for category, spent in costs.items():
            self._spend(Category(category), spent)
        self._lengthen(step, costs)
        self._steps += 1
        self._step, self._reached = step, at
        self._forget()
        self._mark()

    def _follow(self, step: int, at: int) -> None:
        """Account for steps of others, of which nothing is known but that they were made: all of their time is useful.

        How the generation began is not known either: it is accounted for up to the first step that is told.
        """
        if self._step < 0:
            self._go_back(step - 1)
            for span in self._ended(at):
                self._spend(span.category, self._active * span.length, self._cause)
        else:
            costs = Counter({Category.USEFUL.value: self._active * max(0, at - self._reached)})
            self._sums.update(costs)
            self._lengthen(step, costs)
            self._steps += step - self._step
        self._step, self._reached = step, at
        self._forget()
        self._mark()

    def _split(self, event: RecordedEvent, length: int, usual: int) -> Counter[str]:
        """Return what a step cost all nodes: waits are cut out, and who is slow does not wait for itself."""
        step = event.whole("step") or 0
        slow_ones = [one for one in self._slowness if one.since < step <= (step if one.until is None else one.until)]
        data = min(length, max([event.span("data"), *(one.cost for one in slow_ones if one.data)]))
        copy = min(length - data, event.span("copy"))
        rest = length - data - copy
        slow_ones = [one for one in slow_ones if not one.data]
        silent = max(0, rest - usual) if self._silent and usual else 0
        slow = min(rest, max(sum(one.cost for one in slow_ones), silent))
        working = len({name for one in slow_ones for name in one.nodes}) if not silent else 0
        waiting = max(0, self._active - working)
        return Counter(
            {
                Category.DATA.value: self._active * data,
                Category.SAVING.value: self._active * copy,
                Category.SLOW.value: waiting * slow,
                Category.USEFUL.value: self._active * rest - waiting * slow,
            }
        )

    def _divide(self, event: RecordedEvent) -> None:
        """Take what all nodes waited for in steps that were made before, in place of what one rank had measured."""
        waits = waits_of(event)
        place = next((n for n, one in enumerate(self._stretches) if waits is not None and one.last == waits.last), -1)
        if waits is None or place < 0:
            return
        stretch = self._stretches[place]
        if stretch.generation != self._number or stretch.first != waits.first or not self._active:
            return
        whole = sum(stretch.by_category.values())
        each = whole // self._active
        apart = [node for node in waits.apart if node in self._names][: self._active]
        data = saving = slow = 0
        for node, nodes in (*((node, 1) for node in apart), ("", self._active - len(apart))):
            mine = waits.of(node)
            for_data = min(each, mine[0] * waits.steps)
            for_saving = min(each - for_data, mine[1] * waits.steps)
            data, saving = data + nodes * for_data, saving + nodes * for_saving
            slow += nodes * min(each - for_data - for_saving, mine[2] * waits.steps)
        # Of a rank that stands still, or whose stage nobody else holds, the rows do not tell.
        slow = min(whole - data - saving, max(slow, stretch.by_category.get(Category.SLOW.value, 0)))
        known = Counter({Category.DATA.value: data, Category.SAVING.value: saving, Category.SLOW.value: slow})
        known[Category.USEFUL.value] = whole - known.total()
        self._sums.update(known)
        self._sums.subtract(stretch.by_category)
        self._stretches[place] = replace(stretch, by_category=_table(known))

    def _lengthen(self, step: int, costs: Mapping[str, int]) -> None:
        last = self._stretches[-1] if self._stretches else None
        if last is None or last.generation != self._number or (step > last.last and last.last % TOGETHER == 0):
            self._stretches.append(
                StepStretch(generation=self._number, first=step, last=step, by_category=_table(costs))
            )
        else:
            # What a step took less than it was thought to may belong to a stretch that has ended.
            place = next(n for n in reversed(range(len(self._stretches))) if not n or self._stretches[n].first <= step)
            stretch = self._stretches[place]
            both = Counter(stretch.by_category)
            both.update(costs)
            self._stretches[place] = replace(stretch, last=max(stretch.last, step), by_category=_table(both))
        own = [n for n, one in enumerate(self._stretches) if one.generation == self._number]
        if len(own) > AWAITED:
            self._join(own[0])
        if len(self._stretches) > STRETCHES:
            self._join(0)

    def _join(self, place: int) -> None:
        """Put a stretch and the one after it together."""
        one, other = self._stretches[place : place + 2]
        both = Counter(one.by_category)
        both.update(other.by_category)
        self._stretches[place : place + 2] = [replace(other, first=one.first, by_category=_table(both))]

    def _go_back(self, base: int) -> None:
        """Take note that the present generation goes on from step `base`: what was made beyond it is repeated."""
        kept: list[StepStretch] = []
        for stretch in self._stretches:
            if stretch.last <= base or stretch.generation >= self._number:
                kept.append(stretch)
                continue
            lost, all_steps = stretch.last - max(base, stretch.first - 1), stretch.last - stretch.first + 1
            moved = {name: spent * lost // all_steps for name, spent in stretch.by_category.items()}
            for name, spent in moved.items():
                self._move(name, Category.REPEATED, spent)
            self._steps = max(0, self._steps - lost)
            if lost < all_steps:
                rest = {name: spent - moved[name] for name, spent in stretch.by_category.items()}
                kept.append(replace(stretch, last=base, by_category=rest))
        self._stretches = kept

    def _under_way(self, now: int) -> list[Span]:
        """Return what active nodes are at since the last mark, as far as that is known already."""
        if self._done or self._left or self._failed is not None or not self._trains or self._step < 0:
            return self._ended(now)
        usual = min(now, self._reached + (self._usual or max(0, self._first)))
        return [Span(self._reached, usual, Category.USEFUL), Span(usual, now, Category.UNKNOWN)]


def _table(sums: Mapping[str, int]) -> dict[str, int]:
    return {str(name): spent for name, spent in sums.items() if spent}

"""Which node slows all others down: found by how long the same work takes, never by waiting. Pure.

In a pipeline everybody waits for everybody, and who waits least is the slow one only where all stages are alike. Busy
time for the same work does not mislead: log(busy / rounds) of a rank is log w of its place + log s of its node + noise.

- Ranks of one place, and inner stages of equal size, do the same work: w is the time of their faster half. The faster
  ones are taken for well, since a node is sooner slowed down than sped up; of two, the slower one is named.
- A place that a single node holds has nobody to be compared with as a whole. Its w is what it took in the generation's
  first windows, less what is known of its node; or, where every such place has been held by a node of known speed
  before, what it took there. What has come to all places since (longer samples, a busy machine) is nobody's: the low
  median over them is taken off. FLOPs are not used: heads, embeddings and unlike blocks are off by more than what is
  sought, and a wrong finding costs a change of layout.
- Where a model's blocks are alike, what is looked at of such a place is a forward pass of one block, without what comes
  before and after the blocks. It is the same work wherever it is, so that a node is found, too, that is slow from the
  first step on, by `UNEVEN` times as much as is sought: a busy host gives a processor sooner to whoever waits more, so
  that stages differ by a third at times though nobody is slow. Blocks that pass in less than `MEASURABLE` are not
  looked at: waking up after a wait takes as long.
- What has gone faster at all places since the first windows (a machine that was busy) is taken off as well, as far as a
  node's blocks take longer than others' now. Where another node was the slow one at first, and is well again, they do
  not: nobody has become slow by that.
- What is compared with the first windows, and what is compared between stages, are two measures with a noise of their
  own each. A value that is the one in some windows and the other in others looks noisy, and hides what both show.

A node's noise is how its lateness differs between windows. What all ranks do alike, as on a machine that is busy at
times, is not in it, nor what differs between places: a head's time varies where a block's does not.

A node is slow when that shows in three of four windows of at least `SPAN` seconds, and their median exceeds its noise.
It is well again when it is gone for twice as long. One step of any length is one window. Besides computing, a rank may
hold all others up with its data loader or with its update and snapshots; what the script does between steps on some
ranks only is the script's own.

It exceeds its noise if chance does not explain it, however few windows the noise is known from (`noise`): all nodes,
windows and numbers of windows together name somebody by chance once in `SELDOM` seconds at most, for each kind. That
takes noise that is independent from one window to the next and, while windows are few, about the same on all nodes,
since others' counts as well. A place's usual time has an error, too, of the windows that it is known from.

A connection is slow that has become so in its generation: transfers differ as sizes and networks do. What is usual of a
group is the least median of its transfers over `RECENT` windows so far: a machine that is busy at first would hide what
comes later.
Where each node is in the same groups as another one, as with data parallelism alone, none can be told from the others.

Every node's keeper runs this on the same rows and comes to the same finding. Of earlier generations, one that joins
knows who was slow, by the record, and that has to be seen to be over before it says so; the rest it finds as soon as it
has seen enough.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from statistics import median, median_high, median_low

from elastic3d.health import blame, noise, sheet
from elastic3d.health.sheet import StepSheet, sheet_of
from elastic3d.health.slow_node import SlowKind, SlowNode, SpeedFinding
from elastic3d.planner.placement import place_of
from elastic3d.values import Layout

SPAN = 20.0
"""Seconds of steps, and `LEAST` windows, after which a node is slow; well again after twice as many.

Where there is too much noise to tell, `TIMES` as many are looked at. Where windows are so long that `LEAST` are enough,
one more is, too, so that one of four may be amiss there as well."""

LEAST, TIMES, TWICE = 3, (1, 2, 4), 2
SHARE = 0.75
"""Share of these windows in which it has to show, among them the last."""

WINDOW = 1.0
"""Least seconds of a window; it has whole rows."""

SELDOM = 86400.0
"""Seconds of training in which any node is found to be slow once at most, on average and for each kind, if none is."""

OTHERS = 8
"""Most degrees of freedom that other nodes' noise counts for."""

LEAST_NOISE = 0.005
WELL = 1.07
"""Below this factor a node is well again, or half way to `slow` if that is lower."""

AGREE, SLACK = 0.03, 0.02
"""All ranks' times must add up to the same, to this share or to so many seconds a window; else it says nothing.

A step ends on each rank at a time of its own, so that what one lacks in a row, because it was late in its last step, it
has in the next one: a window is continued until they agree."""

LONGEST = 4.0
"""How many times as long as others may be a window is given up in which ranks' times do not agree."""

ALONE = 3
"""Windows of a generation from which a place that a single node holds is known; better from up to `RECENT` of them."""

MEASURABLE = 0.001
"""Seconds that a pass of one block takes at least where that is compared between stages."""

UNEVEN = 1.25
"""Factor by which blocks of two stages may differ from the first step on, with nobody slow."""

CHANGE = 1.1
"""Factor by which a node's slowness has to change to be told again."""

KEPT, RECENT = 64, 20
"""Windows that are kept, and those of which the noise is."""


class _Measure(StrEnum):
    """What a node's lateness is of."""

    WORK = "work"  # the same work, elsewhere or in the first windows
    STAGES = "stages"  # blocks of other stages, beyond `UNEVEN`
    DATA = "data"
    HOST = "host"
    LINK = "link"

    @property
    def kind(self) -> SlowKind:
        """What a node is slow in where it shows."""
        return SlowKind.COMPUTE if self in _COMPUTING else SlowKind(self)


_COMPUTING = (_Measure.WORK, _Measure.STAGES)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedWindow:
    """Some rows of all ranks. first, last: steps; seconds: of all of them; sheets: by rank, means."""

    first: int
    last: int
    seconds: float
    sheets: tuple[StepSheet, ...]


class Speeds:
    """Takes the rows of all steps; `slow` is from which factor on a node is."""

    def __init__(self, slow: float) -> None:
        self._enter, self._well = math.log(slow), math.log(min(WELL, 1 + (slow - 1) / 2))
        self.slow: dict[str, SlowNode] = {}
        self.key = ""
        self._layout: Layout | None = None
        self._nodes: tuple[str, ...] = ()
        self._known: dict[object, float] = {}
        self._begin()

    def begin(self, key: str, layout: Layout, nodes: Sequence[str], known: Iterable[SlowNode] = ()) -> None:
        """Another generation trains from now on. nodes: the id of each rank's node.

        known: those of them that were found to be slow by others. They are until they are seen to be well.
        """
        self.key, self._layout, self._nodes = key, layout, tuple(nodes)
        self.slow = {id: node for id, node in self.slow.items() if id in nodes}
        for node in known:
            self.slow.setdefault(node.id, node)
        self._begin()
        self._before = set(self.slow)

    def _begin(self) -> None:
        self._rows: dict[int, StepSheet | None] = {}
        self._open: list[tuple[int, tuple[StepSheet, ...]]] = []
        self._windows: deque[SpeedWindow] = deque(maxlen=KEPT)
        self._tracks: dict[tuple[str, _Measure], deque[float]] = {}
        self._works: dict[object, deque[float]] = defaultdict(lambda: deque(maxlen=KEPT))
        self._usual: dict[object, float] = {}
        self._learned = 0
        self._alone: set[str] = set()
        self._independent = 1
        self._by_block: bool | None = None
        self._taken: deque[dict[blame.Group, float]] = deque(maxlen=RECENT)
        self._transfers: dict[blame.Group, float] = {}
        self._told: dict[str, SlowNode] | None = None
        # Slow before this generation, and not seen to be in it yet.
        self._before = set()

    def heard(self, step: int, rows: Iterable[Sequence[float]]) -> SpeedFinding | None:
        """Take the rows that rode in the vote of a step; return what is known if that is news."""
        world = len(self._nodes)
        self._rows |= dict(zip(sheet.speakers(step, world), map(sheet_of, rows), strict=False))
        if step % sheet.EVERY:
            return None
        heard = [self._rows.get(rank) for rank in range(world)]
        self._rows = {}
        sheets = tuple(one for one in heard if one is not None)
        if len(sheets) < world:
            self._open = []
            return None
        self._open.append((step - sheet.EVERY, sheets))
        by_rank = list(zip(*(sheets for _, sheets in self._open), strict=True))
        totals = [sheet.EVERY * sum(one.total for one in own) for own in by_rank]
        seconds, row = median(totals), sheet.EVERY * median(one.total for one in sheets)
        if seconds < WINDOW:
            return None
        if not _agree(totals):
            self._open = self._open if seconds < LONGEST * max(WINDOW, row) else []
            return None
        first, last = self._open[0][0] - sheet.EVERY + 1, self._open[-1][0]
        self._open = []
        self._windows.append(SpeedWindow(first=first, last=last, seconds=seconds, sheets=tuple(map(_mean, by_rank))))
        return self._judge(step)

    # One window.

    def _judge(self, step: int) -> SpeedFinding | None:
        late = {
            **self._computing(),
            _Measure.DATA: self._loading(),
            _Measure.HOST: self._own(),
            _Measure.LINK: self._transferring(),
        }
        for measure, ranks in late.items():
            for id in dict.fromkeys(self._nodes):
                own = [lateness for rank, lateness in ranks.items() if self._nodes[rank] == id]
                if own:
                    self._tracks.setdefault((id, measure), deque(maxlen=KEPT)).append(max(own))
                else:
                    self._tracks.pop((id, measure), None)
        return self._finding(step, late)

    def _computing(self) -> dict[_Measure, dict[int, float]]:
        """Return how late each rank's passes are, where that is known, as logs, by what they are compared with."""
        sheets = self._windows[-1].sheets
        took = [math.log(one.busy / one.rounds) for one in sheets]
        if self._by_block is None:
            self._by_block = min(one.block for one in sheets) >= MEASURABLE
        # Of places that a single node holds.
        taken = [math.log(max(one.block, MEASURABLE / 10)) for one in sheets] if self._by_block else took
        late: dict[int, float] = {}
        alone: list[object] = []
        now: dict[object, float] = {}
        places = self._places()
        for place, ranks in places.items():
            slowest = _by_node(ranks, self._nodes, took)
            if len(slowest) > 1:
                late |= {rank: took[rank] - _of_others(self._nodes[rank], slowest) for rank in ranks}
            else:
                alone.append(place)
            now[place] = median_low(_by_node(ranks, self._nodes, taken).values())
            self._works[place].append(now[place])
        # What two nodes differ by is one number, whichever of them is late.
        held = [len({self._nodes[rank] for rank in ranks}) for ranks in places.values()]
        self._independent = sum(max(1, nodes - 1) for nodes in held) - (max(held) == 1)
        self._learn(places, alone)
        single = [rank for place in alone for rank in places[place]]
        slowest = _by_node(range(len(taken)), self._nodes, taken)
        between: dict[int, float] = {}
        if self._by_block and len(slowest) > 1:
            between = {rank: taken[rank] - _of_others(self._nodes[rank], slowest) for rank in single}
        if single and self._usual:
            common = median_low(now[place] - self._usual[place] for place, own in places.items() for _ in own)
            for place in alone:
                for rank in places[place]:
                    later = taken[rank] - self._usual[place]
                    known = max(later, min(later - common, between.get(rank, later)))
                    late[rank] = later - common if common > 0 else known
        stages = {rank: longer - math.log(UNEVEN) for rank, longer in between.items()}
        return {_Measure.WORK: late, _Measure.STAGES: stages}

    def _learn(self, places: Mapping[object, Sequence[int]], alone: Sequence[object]) -> None:
        """Find what each place takes on a node that is well: from the first windows, as long as nobody looks slow."""
        self._alone = {self._nodes[places[place][0]] for place in alone}
        if self._learned == 0 and all(self._content(place) in self._known for place in places):
            self._usual = {place: self._known[self._content(place)] for place in places}
            self._learned = RECENT
        windows = len(self._windows)
        if windows < ALONE or self._learned >= RECENT:
            return
        if self._learned and any(id in self.slow or self._looks_slow(id) for id in self._alone):
            return
        took = {place: median(list(self._works[place])[:windows]) for place in places}
        for place, ranks in places.items():
            id = self._nodes[ranks[0]]
            others = [took[other] for other, held in places.items() if self._nodes[held[0]] != id]
            self._usual[place] = took[place] - (self._later(id, took[place], others) if place in alone else 0.0)
        self._learned = windows
        self._known |= {self._content(place): work for place, work in self._usual.items()}

    def _later(self, id: str, took: float, others: Sequence[float]) -> float:
        """Return by how much a node takes longer that is known to be slow, as a log: as far as its blocks still do.

        others: what the places of other nodes take.
        """
        node = self.slow.get(id)
        if node is None or node.kind is not SlowKind.COMPUTE:
            return 0.0
        known = math.log(node.rho)
        longer = took - median_high(others) if self._by_block and others else known
        return known if longer > known - math.log(UNEVEN) else max(0.0, longer)

    def _looks_slow(self, id: str) -> bool:
        return any(median(list(self._tracks.get((id, one), (0.0,)))[-ALONE:]) >= self._enter for one in _COMPUTING)

    def _loading(self) -> dict[int, float]:
        """Return by how much ranks that load data lengthen the step by it."""
        assert self._layout is not None
        ends = (0, self._layout.pp - 1)
        return self._lengthened([[r for r in range(len(self._nodes)) if self._pp(r) in ends]], lambda one: one.data)

    def _own(self) -> dict[int, float]:
        """Return by how much ranks lengthen the step by their updates and snapshots."""
        return self._lengthened(list(self._places().values()), lambda one: one.update + one.copy)

    def _lengthened(self, groups: Sequence[Sequence[int]], seconds: Callable[[StepSheet], float]) -> dict[int, float]:
        sheets = self._windows[-1].sheets
        total = median(one.total for one in sheets)
        took = [seconds(one) for one in sheets]
        late: dict[int, float] = {}
        for ranks in groups:
            slowest = _by_node(ranks, self._nodes, took)
            if len(slowest) > 1:
                for rank in ranks:
                    longer = took[rank] - _of_others(self._nodes[rank], slowest)
                    late[rank] = _longer(longer, total)
        return late

    def _transferring(self) -> dict[int, float]:
        """Return by how much ranks lengthen the step by their connections, where that is known."""
        assert self._layout is not None
        window = self._windows[-1]
        total = median(one.total for one in window.sheets)
        taken = blame.transfers(self._layout, window.sheets)
        self._taken.append(taken)
        if len(self._taken) < ALONE:
            return {}
        for group in taken:
            recent = median(one[group] for one in self._taken)
            self._transfers[group] = min(recent, self._transfers.get(group, recent))
        late = {group: _longer(taken[group] - self._transfers[group], total) for group in taken}
        by_node = blame.endpoints(late, self._nodes)
        return {rank: by_node[id] for rank, id in enumerate(self._nodes) if id in by_node}

    # All windows.

    def _finding(self, step: int, late: Mapping[_Measure, Mapping[int, float]]) -> SpeedFinding | None:
        entered, left = [], []
        looked_at, many = self._looked_at(), self._last(TWICE)
        for id in dict.fromkeys(self._nodes):
            shown = [
                node
                for measure in _Measure
                for windows in looked_at
                if (node := self._shown(id, measure, windows, late[measure])) is not None
            ]
            now = max(shown, key=lambda node: node.rho, default=None)
            before = self.slow.get(id)
            if now is not None:
                since = before.since if before is not None else now.since
                if id in self._before:
                    # The run may have gone back behind the step in which that began.
                    since = min(since, self._windows[0].first)
                lasted = sum(window.seconds for window in self._windows if window.first >= since)
                self.slow[id] = replace(
                    now, since=since, cost=self._cost(now), seconds=lasted, detail=self._detail(now)
                )
                if before is None or id in self._before:
                    self._before.discard(id)
                    entered.append(self.slow[id])
            elif before is not None and self._is_well(id, before.kind, many):
                self._before.discard(id)
                left.append(self.slow.pop(id))
        if not (entered or left or self._is_news(bool(looked_at))):
            return None
        self._told = dict(self.slow)
        return SpeedFinding(key=self.key, step=step, slow=dict(self.slow), entered=tuple(entered), left=tuple(left))

    def _is_news(self, known: bool) -> bool:
        if self._told is None:
            return known
        before = {id: node.rho for id, node in self._told.items()}
        return any(abs(math.log(node.rho / before[id])) > math.log(CHANGE) for id, node in self.slow.items())

    def _shown(self, id: str, measure: _Measure, windows: int, late: Mapping[int, float]) -> SlowNode | None:
        track = self._tracks.get((id, measure), ())
        last = list(track)[-windows:]
        shows = [one >= self._enter for one in last]
        if len(track) < windows or not shows[-1] or sum(shows) < SHARE * windows:
            return None
        shown = next((n for n, one in enumerate(reversed(track)) if one < self._enter), len(track))
        if median(last) < self._by_chance(id, measure, windows, max(windows, shown)):
            return None
        rho = math.exp(median(last)) * (UNEVEN if measure is _Measure.STAGES else 1.0)
        since = self._windows[-min(shown, windows)].first
        ranks = tuple(rank for rank, one in late.items() if self._nodes[rank] == id and one >= self._enter)
        return SlowNode(id=id, rho=rho, kind=measure.kind, since=since, ranks=ranks, windows=sum(shows), of=windows)

    def _by_chance(self, id: str, measure: _Measure, windows: int, since: int) -> float:
        """Return what so many windows' median lateness hardly exceeds by chance, of a node that is not slow.

        since: how many windows ago it may have become slow, and others with it.
        """
        spreads = {
            other: noise.spread(list(track)[-max(RECENT, windows) :], since)
            for (other, what), track in self._tracks.items()
            if what is measure
        }
        own = known = spreads.pop(id)
        if measure in _COMPUTING:
            others = min(OTHERS, own.freedom * (self._independent - 1))
            known += sum(spreads.values(), start=noise.Noise()).limited(others)
        # Others' noise adds to what is known of a node's own, and does not make it less.
        deviation = max(LEAST_NOISE, own.deviation, known.deviation)
        error = noise.standard_error(deviation, windows)
        if measure is _Measure.WORK and id in self._alone and self._learned:
            error = math.hypot(error, noise.standard_error(deviation, self._learned))
        # Four long windows are hardly another look than three; medians exceed their share of chance by far more seldom.
        looks = len(set(self._nodes)) * sum(self._last(times) > 0 for times in TIMES)
        looks *= sum((id, other) in self._tracks for other in _Measure if other.kind is measure.kind)
        return error * noise.student(self._windows[-1].seconds / SELDOM / looks, known.freedom)

    def _is_well(self, id: str, kind: SlowKind, windows: int) -> bool:
        tracks = [list(track) for (other, one), track in self._tracks.items() if other == id and one.kind is kind]
        if not windows or not tracks or min(map(len, tracks)) < windows:
            return False
        lasts = [track[-windows:] for track in tracks]
        return all(last[-1] < self._well and sum(one < self._well for one in last) >= SHARE * windows for last in lasts)

    def _looked_at(self) -> tuple[int, ...]:
        """Return how many of the last windows are looked at, the fewest first; () if there are not enough yet."""
        numbers = {self._last(times) for times in TIMES} - {0}
        if LEAST in numbers and len(self._windows) > LEAST:
            numbers.add(LEAST + 1)
        return tuple(sorted(numbers))

    def _last(self, times: int) -> int:
        """Return how many of the last windows take so many `SPAN`; 0 if there are not enough yet."""
        lasted = 0.0
        for number, window in enumerate(reversed(self._windows), start=1):
            lasted += window.seconds
            if lasted >= times * SPAN and number >= times * LEAST:
                return number
        return 0

    def _cost(self, node: SlowNode) -> float:
        window = self._windows[-1]
        if node.kind is not SlowKind.COMPUTE:
            return median(one.total for one in window.sheets) * (1 - 1 / node.rho)
        assert self._layout is not None
        own = {rank: node.rho for rank, id in enumerate(self._nodes) if id == node.id}
        return blame.seconds_lost(self._layout, window.sheets, own)

    def _detail(self, node: SlowNode) -> str:
        window, rank = self._windows[-1], node.ranks[0] if node.ranks else self._nodes.index(node.id)
        mine = window.sheets[rank]
        share = f"in {node.windows} of the last {node.of} windows of {window.seconds:.1f} s"
        match node.kind:
            case SlowKind.COMPUTE:
                each, usual = mine.busy / mine.rounds, mine.busy / mine.rounds / node.rho
                return (
                    f"rank {rank} computes {each * 1000:.1f} ms for each micro-batch, and others {usual * 1000:.1f} ms "
                    f"for the same work, {share}; it computes for {mine.busy:.3g} s of a step of {mine.total:.3g} s"
                )
            case SlowKind.DATA:
                reads = f", which reads {mine.read / 1e6:.3g} MB of object storage for it" if mine.read else ""
                waits = f"rank {rank} waits {mine.data:.3g} s of a step of {mine.total:.3g} s for its data loader"
                return f"{waits}{reads}, {share}"
            case SlowKind.HOST:
                own = mine.update + mine.copy
                return (
                    f"rank {rank} takes {own:.3g} s of a step of {mine.total:.3g} s for updates and snapshots, "
                    f"more than others of its place, {share}"
                )
            case SlowKind.LINK:
                return (
                    f"whatever node {node.id.partition('@')[0]} exchanges with others takes longer than it did, and "
                    f"what they exchange among each other does not, {share}"
                )

    # Places.

    def _pp(self, rank: int) -> int:
        assert self._layout is not None
        return place_of(rank, self._layout).pp

    def _places(self) -> dict[object, list[int]]:
        """Return the ranks that do the same work, by their place: a stage; of the inner ones, a size of stage."""
        assert self._layout is not None
        places: dict[object, list[int]] = defaultdict(list)
        for rank in range(len(self._nodes)):
            pp = self._pp(rank)
            inner = 0 < pp < self._layout.pp - 1
            places[("inner", self._windows[-1].sheets[rank].work) if inner else pp].append(rank)
        return places

    def _content(self, place: object) -> object:
        layout = self._layout
        assert layout is not None
        return (place, self._by_block, layout.pp, layout.cp, layout.tp, layout.schedule, layout.virtual, layout.cuts)


def _longer(seconds: float, total: float) -> float:
    """Return by how much so many seconds lengthen a step that takes `total` with them, as a log."""
    return -math.log(max(0.01, 1 - seconds / total))


def _of_others(node: str, slowest: Mapping[str, float]) -> float:
    """Return what the work takes other nodes than this one: more than half of the fewest that are well suffice."""
    return median_high(took for id, took in slowest.items() if id != node)


def _by_node(ranks: Iterable[int], nodes: Sequence[str], took: Sequence[float]) -> dict[str, float]:
    slowest: dict[str, float] = {}
    for rank in ranks:
        slowest[nodes[rank]] = max(took[rank], slowest.get(nodes[rank], -math.inf))
    return slowest


def _agree(totals: Sequence[float]) -> bool:
    return max(totals) - min(totals) <= max(AGREE * max(totals), SLACK)


def _mean(sheets: Sequence[StepSheet]) -> StepSheet:
    return StepSheet(**{name: sum(getattr(one, name) for one in sheets) / len(sheets) for name in StepSheet.__slots__})

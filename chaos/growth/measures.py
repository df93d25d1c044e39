"""The series that a soak looks at, each with the bar that it must stay below.

A process that lasts is one that was there from the warm-up to the end: agents, keepers and templates of nodes that are
never lost, and etcd. Trainers and other templates are young by design; they are looked at by kind, as the median of
those alive, which grows if each new one begins with more than the one before.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from chaos.growth.sampling import ETCD, KINDS, EtcdSample, ProcessSample, Sample
from chaos.growth.slopes import Bar, Fit, Point, fit, grows, warm_up
from chaos.machine.processes import Part

MB = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Series that are drawn together. unit: of a value; scale: what is one of it."""

    name: str
    unit: str = ""
    scale: float = 1.0

    def shown(self, value: float) -> str:
        """Return a value, or a slope, in the group's unit."""
        value /= self.scale
        return f"{value:.3f}" if 0.0005 < abs(value) < 0.1 else f"{value:.1f}" if abs(value) < 1000 else f"{value:.0f}"


LASTING = Group(name="memory of lasting processes", unit="MB", scale=MB)
KIND = Group(name="memory by kind, median", unit="MB", scale=MB)
TOTAL = Group(name="memory by kind, sum", unit="MB", scale=MB)
DESCRIPTORS = Group(name="descriptors of lasting processes")
THREADS = Group(name="threads of lasting processes")
KEYS = Group(name="keys in etcd")
DATABASE = Group(name="bytes in etcd", unit="MB", scale=MB)
FILES = Group(name="files")
STORED = Group(name="bytes of store", unit="MB", scale=MB)
EVENTS = Group(name="bytes of events", unit="MB", scale=MB)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """One series. bar: None where growth is by design. line: None where there are too few points."""

    name: str
    group: Group
    points: tuple[Point, ...]
    bar: Bar | None
    line: Fit | None

    @property
    def grows(self) -> bool:
        """Whether it grows by more than its bar."""
        return self.bar is not None and self.line is not None and grows(self.line, self.bar)


# The bars. Slopes are what a day may bring: 48 MB in a keeper. Floors are what soaks of some minutes moved by though
# nothing is known to leak: on two busy processors, three nodes, a fault about every 20 s, a generation about every
# minute, in fifteen minutes of which the job waited for nodes for about half, the keeper that lasts rose by 2 MB in
# eleven minutes after the warm-up, and by 8 MB in the ten minutes before; it swung by 2 MB when a template died. Its
# descriptors were 51 to 72 by how many peers it had, its threads 34 to 38. Agents, templates and trainers moved by
# less than 2 MB, but a template that starts counts half for some seconds, and a trainer up to 10 MB more beside
# others than alone. Keys of the present were 9 to 16. The database was below 0.5 MB: old revisions stay in it until
# they are compacted. The store had 130 files and 23 MB when the first collection came, seven minutes after the first
# step, and 30 to 50 files and 3 to 9 MB from then on.
PROCESS_MEMORY = Bar(per_hour=2 * MB, per_generation=12_000, floor=8 * MB, share=0.05)
YOUNG_MEMORY = Bar(per_hour=4 * MB, per_generation=24_000, floor=24 * MB, share=0.1)
COUNTS = Bar(per_hour=2, per_generation=0.01, floor=12, share=0.1)
ETCD_KEYS = Bar(per_hour=2, per_generation=0.01, floor=8, share=0.2)
ETCD_BYTES = Bar(per_hour=1 * MB, per_generation=6_000, floor=4 * MB, share=0.2)
STORE_FILES = Bar(per_hour=10, per_generation=0.05, floor=200, share=0.3)
STORE_BYTES = Bar(per_hour=2 * MB, per_generation=12_000, floor=40 * MB, share=0.3)

_Value = Callable[[ProcessSample], int]


def measures(samples: Sequence[Sample]) -> tuple[Measure, ...]:
    """Return every series of a soak, with its line and its bar. What came before the first step is left out."""
    trained = [sample for sample in samples if sample.step]
    if not trained:
        return ()
    began, end = trained[0].at, trained[-1].at
    since = began + warm_up(end - began)
    series = [
        Measure(name=name, group=group, points=tuple(points), bar=bar, line=fit(points, since=since))
        for name, group, points, bar in (
            *_lasting(trained, since),
            *_kinds(trained),
            *_etcd(trained),
            *_folders(trained),
        )
        if points
    ]
    order = list(dict.fromkeys(measure.group for measure in series))
    return tuple(sorted(series, key=lambda measure: order.index(measure.group)))


_Series = Iterator[tuple[str, Group, list[Point], Bar | None]]


def _lasting(samples: Sequence[Sample], since: float) -> _Series:
    last = {one.pid for one in samples[-1].processes}
    first = next((sample for sample in samples if sample.at >= since), samples[-1])
    for lasting in (one for one in first.processes if one.pid in last and one.kind != YOUNG):
        name = f"{lasting.node} {lasting.kind}".strip()
        for group, value, bar in _OF_PROCESS:
            points = [
                _point(sample, value(one)) for sample in samples for one in sample.processes if one.pid == lasting.pid
            ]
            yield name, group, points, bar


YOUNG = KINDS[Part.TRAINERS]

_OF_PROCESS: tuple[tuple[Group, _Value, Bar], ...] = (
    (LASTING, lambda one: one.held, PROCESS_MEMORY),
    (DESCRIPTORS, lambda one: one.descriptors, COUNTS),
    (THREADS, lambda one: one.threads, COUNTS),
)


def _kinds(samples: Sequence[Sample]) -> _Series:
    for kind in (*KINDS.values(), ETCD):
        median, total = [], []
        for sample in samples:
            own = [one for one in sample.processes if one.kind == kind]
            if own:
                median.append(_point(sample, statistics.median(one.held for one in own)))
                total.append(_point(sample, sum(one.memory for one in own)))
        # How many there are changes with the faults.
        yield f"{kind}s" if kind != ETCD else ETCD, TOTAL, total, None
        if kind != ETCD:
            yield kind, KIND, median, YOUNG_MEMORY


def _etcd(samples: Sequence[Sample]) -> _Series:
    values: tuple[tuple[str, Group, Callable[[EtcdSample], float], Bar | None], ...] = (
        ("keys of the present", KEYS, lambda one: sum(one.keys.values()), ETCD_KEYS),
        # A job keeps a fixed number of earlier generations.
        ("keys of the past", KEYS, lambda one: one.past, None),
        ("keys and values", DATABASE, lambda one: one.bytes, None),
        ("database in use", DATABASE, lambda one: one.in_use, ETCD_BYTES),
        ("database", DATABASE, lambda one: one.database, None),
    )
    for name, group, value, bar in values:
        yield name, group, [_point(sample, value(sample.etcd)) for sample in samples if sample.etcd], bar


def _folders(samples: Sequence[Sample]) -> _Series:
    yield "store's files", FILES, [_point(sample, sample.store.files) for sample in samples], STORE_FILES
    yield "event files, one a node", FILES, [_point(sample, sample.events.files) for sample in samples], None
    yield "store", STORED, [_point(sample, sample.store.bytes) for sample in samples], STORE_BYTES
    yield "events, some of each step", EVENTS, [_point(sample, sample.events.bytes) for sample in samples], None


def _point(sample: Sample, value: float) -> Point:
    return Point(at=sample.at, generation=sample.generation, value=value)

"""The values of the metrics, counted from a keeper's events: rules of the table, and what takes more than a rule.

Pure: no clock, no thread, no port. Its methods may be called from any thread, and take some microseconds.
"""

from __future__ import annotations

import math
import threading
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, product
from typing import Any

from elastic3d.health.sheet import Row, sheet_of
from elastic3d.metrics.metric import OTHER, Metric, MetricKind, Rule, Source, Teller
from elastic3d.metrics.recovery import SIGNS, RecoveryWatch
from elastic3d.metrics.table import CLEAN, METRICS, PHASES
from elastic3d.planner.traffic import GradientTraffic

Values = tuple[str, ...]
"""The values of a metric's own labels, in order."""

RECOVERY = "elastic3d_recovery_duration_seconds"
PEAK = "elastic3d_node_peak_flops_per_second"
UP = ("elastic3d_etcd_up", "elastic3d_etcd_writable")
"""Gauges that are 1 until an event says otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """A histogram's or a summary's value. counts: of observations up to each bound, and of all, ascending."""

    counts: tuple[float, ...]
    sum: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricValue:
    """The value of one series."""

    name: str
    labels: Values
    value: float | Distribution


@dataclass(slots=True, kw_only=True)
class _Observed:
    counts: list[int]
    sum: float = 0.0


@dataclass(slots=True, kw_only=True)
class _State:
    """What is known of the run beside the values themselves."""

    leader: str = ""
    sample_flops: float = 0.0
    peak: float | None = None
    traffic: GradientTraffic = field(default_factory=GradientTraffic)
    highest: int = -1
    clean: int | None = None
    unreachable: set[str] = field(default_factory=set)
    recovery: RecoveryWatch = field(default_factory=RecoveryWatch)


class MetricRecorder:
    """Counts what one node's keeper writes to its journal. node: its name."""

    def __init__(self, node: str) -> None:
        self._node = node
        self._lock = threading.Lock()
        self._numbers: dict[tuple[str, Values], float] = {}
        self._observed: dict[tuple[str, Values], _Observed] = {}
        self._state = _State()
        self._rules: dict[str, list[tuple[Metric, Rule]]] = defaultdict(list)
        for metric in METRICS.values():
            for rule in metric.rules:
                self._rules[rule.event].append((metric, rule))
            for labels in product(*(label.values for label in metric.labels)):
                if metric.kind is MetricKind.COUNTER:
                    self._numbers[metric.name, labels] = 0.0
                elif metric.kind is not MetricKind.GAUGE:
                    self._observed[metric.name, labels] = _Observed(counts=[0] * (len(metric.buckets) + 1))
        for name in (*UP, "elastic3d_peers_unreachable", "elastic3d_snapshot_stale", "elastic3d_checkpoint_failing"):
            self._numbers[name, ()] = float(name in UP)

    def observe(self, event: str, fields: Mapping[str, Any], at: float) -> None:
        """Take an event with all its fields, those of its log included. at: monotonic seconds."""
        with self._lock:
            if event in SIGNS:
                self._state.recovery.sign(at)
            self._special(event, fields, at)
            for metric, rule in self._rules.get(event, ()):
                self._apply(metric, rule, fields)

    def stepped(self, step: int, at: float, *, clean: int = -1, row: Row = (), first: bool = False) -> None:
        """Take a step of this node's first trainer, after its event if there is one.

        clean: the newest step that audits vouch for. row: of this trainer, () where none rode in the step's vote.
        first: it is rank 0.
        """
        with self._lock:
            state = self._state
            if not first:
                state.highest = max(state.highest, step)
                state.recovery.stepped(at)
            elif state.clean is not None and clean > state.clean:
                self._add("elastic3d_audits_total", 1.0, CLEAN)
            state.clean = clean
            self._set("elastic3d_audited_step", float(clean) if clean >= 0 else None)
            sheet = sheet_of(row)
            if sheet is not None:
                for phase in PHASES:
                    self._set("elastic3d_step_phase_seconds", getattr(sheet, phase), phase)
                self._set("elastic3d_step_read_bytes", sheet.read)

    def values(self) -> list[MetricValue]:
        """Return the present values."""
        with self._lock:
            numbers: list[tuple[tuple[str, Values], float | Distribution]] = list(self._numbers.items())
            numbers += [
                (key, Distribution(counts=tuple(map(float, accumulate(one.counts))), sum=one.sum))
                for key, one in self._observed.items()
            ]
        return [MetricValue(name=name, labels=labels, value=value) for (name, labels), value in numbers]

    # What takes more than a rule.

    def _special(self, event: str, fields: Mapping[str, Any], at: float) -> None:
        match event:
            case "generation.sealed":
                self._sealed(fields, at)
            case "step.committed":
                self._committed(fields, at)
            case "model.measured":
                self._state.sample_flops = _number(fields.get("sample_flops")) or 0.0
                self._state.peak = _number(fields.get("peak_flops"))
            case "reduction.planned":
                self._state.traffic = GradientTraffic(
                    turn=_number(fields.get("turn_bytes")) or 0.0,
                    step=_number(fields.get("step_bytes")) or 0.0,
                    turn_samples=int(fields.get("turn_samples") or 0),
                )
            case "state.restored" if fields.get("rank") == 0:
                self._state.recovery.restored(at)
            case "peer.unreachable":
                self._reach(fields, self._state.unreachable.add)
            case "peer.reachable":
                self._reach(fields, self._state.unreachable.discard)
            case "peer.refused":
                self._add("elastic3d_connections_refused_total", 1.0 + (_number(fields.get("more")) or 0.0))
            case _:
                pass

    def _sealed(self, fields: Mapping[str, Any], at: float) -> None:
        nodes: Sequence[str] = fields.get("nodes") or ()
        self._state.leader = str(fields.get("leader") or "")
        self._state.clean = None
        self._state.recovery.sealed(str(fields.get("cause") or ""), at, trains=self._node in nodes)
        if not nodes or nodes[0] != self._node:
            self._drop({metric.name for metric in METRICS.values() if metric.source is Source.FIRST})
        if self._node not in nodes:
            self._drop({"elastic3d_step_phase_seconds", "elastic3d_step_read_bytes", "elastic3d_audited_step"})
        self._set(PEAK, self._state.peak if self._node in nodes else None)
        layout = fields.get("layout") or {}
        for axis in ("pp", "dp", "cp", "tp"):
            self._set("elastic3d_layout_size", _number(layout.get(axis)), axis)

    def _committed(self, fields: Mapping[str, Any], at: float) -> None:
        state, step = self._state, int(fields["step"])
        if step <= state.highest:
            self._add("elastic3d_steps_repeated_total", 1.0)
        state.highest = max(state.highest, step)
        first, stop = fields["samples"]
        excluded = sum(end - start for start, end in fields.get("excluded") or ())
        self._add("elastic3d_samples_total", float(stop - first - excluded))
        self._add("elastic3d_samples_excluded_total", float(excluded))
        self._add("elastic3d_model_flops_total", (stop - first - excluded) * state.sample_flops)
        # What is left out is sent nevertheless, and dropped where it arrives.
        self._add("elastic3d_gradient_sent_bytes_total", state.traffic.of_step(stop - first))
        ended = state.recovery.stepped(at)
        if ended is not None:
            self._distribute(METRICS[RECOVERY], (ended.kind,), ended.total)
            for phase, seconds in ended.seconds.items():
                self._add("elastic3d_recovery_phase_seconds_total", seconds, ended.kind, phase)

    def _reach(self, fields: Mapping[str, Any], change: Any) -> None:
        change(str(fields.get("peer")))
        self._set("elastic3d_peers_unreachable", float(len(self._state.unreachable)))

    # Rules.

    def _apply(self, metric: Metric, rule: Rule, fields: Mapping[str, Any]) -> None:
        if rule.where and not fields.get(rule.where):
            return
        if rule.teller is Teller.RANK_0 and fields.get("rank") != 0:
            return
        if rule.teller is Teller.LEADER and self._state.leader != self._node:
            return
        labels = tuple(
            _bounded(fields.get(text[1:]), label.values) if text.startswith("$") else text
            for text, label in zip(rule.labels, metric.labels, strict=True)
        )
        amount = _number(fields.get(rule.amount)) if rule.amount else rule.value
        if metric.kind is MetricKind.GAUGE:
            known = amount is not None and not (rule.least is not None and amount < rule.least)
            self._set(metric.name, amount if known else None, *labels)
        elif amount is None:
            return
        elif metric.kind is MetricKind.COUNTER:
            self._add(metric.name, amount, *labels)
        else:
            self._distribute(metric, labels, amount)

    def _set(self, name: str, value: float | None, *labels: str) -> None:
        if value is None:
            self._numbers.pop((name, labels), None)
        else:
            self._numbers[name, labels] = value

    def _add(self, name: str, amount: float, *labels: str) -> None:
        # A counter never shrinks, and one that is no number never becomes one again.
        if amount > 0 and math.isfinite(amount):
            self._numbers[name, labels] += amount

    def _distribute(self, metric: Metric, labels: Values, amount: float) -> None:
        if amount >= 0 and math.isfinite(amount):
            observed = self._observed[metric.name, labels]
            observed.counts[bisect_left(metric.buckets, amount)] += 1
            observed.sum += amount

    def _drop(self, names: set[str]) -> None:
        for name, labels in [key for key in self._numbers if key[0] in names]:
            if METRICS[name].kind is MetricKind.GAUGE:
                del self._numbers[name, labels]


def _number(value: Any) -> float | None:
    """Return a field of an event as a number: losses are texts of `float.hex`, of lists the length counts."""
    if isinstance(value, list | tuple):
        return float(len(value))
    if isinstance(value, str):
        return float.fromhex(value)
    return None if value is None else float(value)


def _bounded(value: Any, values: Sequence[str]) -> str:
    return str(value) if str(value) in values else OTHER

"""The table of metrics holds to Prometheus' conventions, and to the events and enumerations that it is made of."""

from __future__ import annotations

import re

import pytest

from elastic3d.health.hearing import Finding
from elastic3d.log import BOUND, EVENTS
from elastic3d.membership.records import Pulse
from elastic3d.metrics.metric import COMMON, OTHER, Metric, MetricKind
from elastic3d.metrics.table import METRICS
from elastic3d.values import Cause
from elastic3d.worker.keeper.node_metrics import STATES
from elastic3d.worker.processes.events import ExitKind

UNITS = ("seconds", "bytes", "ratio", "steps", "info", "step", "total", "second")
UNNAMED = re.compile(
    r"elastic3d_(loss|gradient_norm|noise_scale|generation|nodes.*|layout_size|peers_unreachable|.*_(stale|failing|up"
    r"|writable|healthy|state|nodes)|processes)"
)
"""Counts, states, and what the script alone knows the unit of."""


def values(name: str, label: str) -> set[str]:
    """Return the values of a label."""
    return {value for one in METRICS[name].labels if one.name == label for value in one.values}


@pytest.mark.parametrize("metric", METRICS.values(), ids=METRICS)
def test_a_metric_is_named_by_prometheus_conventions(metric: Metric) -> None:
    """Lower case, a base unit at the end, `_total` where and only where it is a counter; a help that is a sentence."""
    assert re.fullmatch(r"elastic3d(_[a-z]+)+", metric.name)
    assert (metric.kind is MetricKind.COUNTER) == metric.name.endswith("_total")
    assert metric.name.rpartition("_")[2] in UNITS or UNNAMED.fullmatch(metric.name), metric.name
    assert not re.search(r"milli|micro|kilo|mega|_ms|percent", metric.name)
    assert metric.help.endswith(".")
    assert bool(metric.buckets) == (metric.kind is MetricKind.HISTOGRAM)
    assert list(metric.buckets) == sorted(set(metric.buckets))


@pytest.mark.parametrize("metric", METRICS.values(), ids=METRICS)
def test_a_rule_reads_events_and_fields_that_there_are(metric: Metric) -> None:
    """And gives each label one of its values, or a field's where others become `OTHER`."""
    for rule in metric.rules:
        kind = EVENTS[rule.event]
        asked = [rule.amount, rule.where, *(text[1:] for text in rule.labels if text.startswith("$"))]
        assert {name for name in asked if name} <= {*kind.fields, *BOUND}, rule
        assert len(rule.labels) == len(metric.labels)
        for text, label in zip(rule.labels, metric.labels, strict=True):
            assert OTHER in label.values if text.startswith("$") else text in label.values, rule


def test_the_values_of_labels_are_those_of_the_code() -> None:
    """None of them ends as `OTHER` unless it is new."""
    assert values("elastic3d_trainer_exits_total", "kind") == {*ExitKind, OTHER}
    assert values("elastic3d_generations_total", "cause") == {*Cause, OTHER}
    assert values("elastic3d_audits_total", "outcome") == {"clean", "inconclusive", OTHER, *Finding}
    assert values("elastic3d_node_state", "state") == set(STATES)
    assert Pulse.__doc__ is not None
    assert all(state in Pulse.__doc__ for state in STATES)


def test_a_node_has_a_bounded_number_of_series() -> None:
    """Whatever happens to it: some hundreds."""
    series = 0
    for metric in METRICS.values():
        assert not {label.name for label in metric.labels} & {*COMMON, "le", "job", "instance"}
        number = 1
        for label in metric.labels:
            assert len(set(label.values)) == len(label.values)
            number *= max(1, len(label.values))
        series += number * (
            len(metric.buckets) + 3 if metric.buckets else 2 if metric.kind is MetricKind.SUMMARY else 1
        )
    assert series < 300

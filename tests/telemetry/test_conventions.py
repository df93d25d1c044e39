"""Names and units are OpenTelemetry's, and come to those of the table again where Prometheus reads them."""

from __future__ import annotations

import re

from elastic3d.metrics.metric import Metric, MetricKind
from elastic3d.metrics.table import METRICS
from elastic3d.telemetry.conventions import name_and_unit


def for_prometheus(name: str, unit: str, metric: Metric) -> str:
    """Return what the specification makes of a name and a unit: dots, the unit's word, and `_total` for what grows."""
    word = {"s": "seconds", "By": "bytes", "1": "ratio" * (metric.kind is MetricKind.GAUGE), "": ""}[unit]
    translated = re.sub(r"[^a-zA-Z0-9:]", "_", name)
    translated += f"_{word}" if word and not translated.endswith(f"_{word}") else ""
    return translated + ("_total" if metric.kind is MetricKind.COUNTER else "")


def test_names_are_opentelemetrys_and_come_back_as_prometheus_has_them() -> None:
    """Neither has two metrics of one name; no unit is left in a name."""
    made = {metric: name_and_unit(metric) for metric in METRICS.values()}
    assert len({name for name, _ in made.values()}) == len(METRICS)
    for metric, (name, unit) in made.items():
        assert re.fullmatch(r"elastic3d\.[a-z]+(_[a-z]+)*", name), name
        assert not name.endswith(("_total", "_seconds", "_bytes")), name
        assert for_prometheus(name, unit, metric) == metric.name

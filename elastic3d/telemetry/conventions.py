"""Names and units of the metrics as OpenTelemetry has them, from the one table.

A unit is a field of its own there (UCUM: "s", "By"), and so is whether a value only grows: neither is part of the name.
What turns metrics into Prometheus' form appends both again: it comes to the very names of the table, as
https://opentelemetry.io/docs/specs/otel/compatibility/prometheus_and_openmetrics/ says.
"""

from __future__ import annotations

from elastic3d.metrics.metric import Metric, MetricKind

_UNITS = {"seconds": "s", "bytes": "By"}
_RATIO = "1"


def name_and_unit(metric: Metric) -> tuple[str, str]:
    """Return a metric's name and unit, the latter "" where it has none."""
    name = metric.name.replace("_", ".", 1).removesuffix("_total")
    head, _, tail = name.rpartition("_")
    if tail in _UNITS:
        return head, _UNITS[tail]
    # Of a gauge alone: to anything else a ratio's unit appends nothing.
    if tail == "ratio" and metric.kind is MetricKind.GAUGE:
        return head, _RATIO
    return name, ""

"""Values of metrics in the formats that Prometheus reads, written by `prometheus_client`.

The package is imported when the first job asks for metrics, and by nobody else.
"""

from __future__ import annotations

import importlib.util
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from elastic3d.errors import ConfigurationError
from elastic3d.metrics.metric import COMMON, Metric, MetricKind
from elastic3d.metrics.recording import Distribution, MetricValue
from elastic3d.metrics.table import METRICS

if TYPE_CHECKING:
    from prometheus_client.core import Metric as Family

_OPEN = "application/openmetrics-text"
_TOTAL = "_total"


def require_client() -> None:
    """Raise ConfigurationError where `prometheus_client` is not installed."""
    if importlib.util.find_spec("prometheus_client") is None:
        raise ConfigurationError(
            "elastic3d.run(metrics=...) needs the package prometheus-client: pip install 'elastic3d[metrics]', or "
            "leave metrics= out"
        )


class Exposition:
    """Writes the values of one node's metrics. run, node: the values of `COMMON`.

    values: called for each document; a metric without a value is left out.
    """

    def __init__(self, run: str, node: str, values: Callable[[], Iterable[MetricValue]]) -> None:
        self._common, self._values = (run, node), values

    def document(self, accept: str) -> tuple[bytes, str]:
        """Return the document and its content type. accept: what a scraper takes, as its header says."""
        from prometheus_client import exposition
        from prometheus_client.openmetrics import exposition as open_exposition

        write: Callable[[Exposition], bytes] = exposition.generate_latest
        kind = exposition.CONTENT_TYPE_PLAIN_0_0_4
        if _OPEN in accept:
            write, kind = open_exposition.generate_latest, open_exposition.CONTENT_TYPE_LATEST
        return write(self), kind

    def collect(self) -> Iterable[Family]:
        """Return the families, in the order of the table; what `prometheus_client` calls."""
        by_name: dict[str, list[MetricValue]] = defaultdict(list)
        for value in self._values():
            by_name[value.name].append(value)
        return [self._family(metric, by_name[name]) for name, metric in METRICS.items() if by_name[name]]

    def _family(self, metric: Metric, values: list[MetricValue]) -> Family:
        from prometheus_client import core

        labels = [*COMMON, *(label.name for label in metric.labels)]
        unit = next((unit for unit in ("seconds", "bytes", "ratio") if metric.name.endswith(unit)), "")
        match metric.kind:
            case MetricKind.GAUGE:
                gauge = core.GaugeMetricFamily(metric.name, metric.help, labels=labels, unit=unit)
                for one in values:
                    assert isinstance(one.value, float)
                    gauge.add_metric([*self._common, *one.labels], one.value)
                return gauge
            case MetricKind.COUNTER:
                counter = core.CounterMetricFamily(metric.name.removesuffix(_TOTAL), metric.help, labels=labels)
                for one in values:
                    assert isinstance(one.value, float)
                    counter.add_metric([*self._common, *one.labels], one.value)
                return counter
            case MetricKind.HISTOGRAM:
                histogram = core.HistogramMetricFamily(metric.name, metric.help, labels=labels, unit=unit)
                for one in values:
                    assert isinstance(one.value, Distribution)
                    bounds = [*(f"{bound:g}" for bound in metric.buckets), "+Inf"]
                    buckets = list(zip(bounds, one.value.counts, strict=True))
                    histogram.add_metric([*self._common, *one.labels], buckets, one.value.sum)
                return histogram
            case MetricKind.SUMMARY:
                summary = core.SummaryMetricFamily(metric.name, metric.help, labels=labels, unit=unit)
                for one in values:
                    assert isinstance(one.value, Distribution)
                    summary.add_metric([*self._common, *one.labels], int(one.value.counts[-1]), one.value.sum)
                return summary

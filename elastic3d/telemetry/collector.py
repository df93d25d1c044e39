"""The collector: metrics and spans in the SDK's own form, sent by its exporters for OTLP over HTTP.

The exporters read OTEL_EXPORTER_OTLP_* - addresses, headers, certificates, compression, timeouts - and try again within
the timeout where the protocol allows that. They say only whether it worked; why it did not, and how many spans were
refused in an answer of 200, is read from the answers, of which no more than `MOST` bytes are read.
"""

from __future__ import annotations

import io
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import version
from typing import Any

import requests
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceResponse
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from opentelemetry.sdk.metrics import export as sdk
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, TraceFlags
from opentelemetry.trace.status import Status, StatusCode
from requests.adapters import HTTPAdapter

from checkpointing.stores.address import redacted_within
from elastic3d.errors import ConfigurationError
from elastic3d.metrics.metric import Metric, MetricKind
from elastic3d.metrics.recording import Distribution, MetricValue
from elastic3d.metrics.table import METRICS
from elastic3d.telemetry.address import CollectorAddress
from elastic3d.telemetry.conventions import name_and_unit
from elastic3d.telemetry.exporting import Sent
from elastic3d.telemetry.span import TraceSpan

MOST = 1 << 16
"""Bytes of an answer that are read."""

SHOWN = 200
"""Characters of an answer that people are shown."""

SERVICE = "elastic3d"


class OtlpCollector:
    """Sends to an address. since: wall seconds from which on counters count.

    ConfigurationError where the environment says what makes no sense.
    """

    def __init__(self, address: CollectorAddress, *, run: str, node: str, since: float) -> None:
        self.endpoint = str(address)
        self._since = round(since * 1e9)
        self._scope = InstrumentationScope("elastic3d", version("elastic3d"))
        self._answers = {signal: _Answers() for signal in ("traces", "metrics")}
        try:
            self._resource = _resource(run, node)
            self._spans = OTLPSpanExporter(endpoint=address.of("traces"), session=_session(self._answers["traces"]))
            self._metrics = OTLPMetricExporter(
                endpoint=address.of("metrics"), session=_session(self._answers["metrics"])
            )
        except Exception as error:  # for some versions, of whatever class their parsers raise
            raise ConfigurationError(
                f"elastic3d.run(telemetry={self.endpoint!r}): OpenTelemetry's exporter cannot be set up: "
                f"{type(error).__name__}: {error}; look at OTEL_EXPORTER_OTLP_* and OTEL_RESOURCE_ATTRIBUTES"
            ) from error
        _quiet()

    def spans(self, spans: Sequence[TraceSpan]) -> Sent:
        """Send spans; blocks for the timeout of the exporter."""
        ready = [_readable(span, self._resource, self._scope) for span in spans]
        return self._answers["traces"].of(lambda: self._spans.export(ready), _refused_spans, len(spans))

    def metrics(self, values: Iterable[MetricValue], at: float) -> Sent:
        """Send the values of metrics at a wall time; blocks as long."""
        scoped = sdk.ScopeMetrics(self._scope, list(_sdk_metrics(values, self._since, round(at * 1e9))), "")
        data = sdk.MetricsData([sdk.ResourceMetrics(self._resource, [scoped], "")])
        return self._answers["metrics"].of(lambda: self._metrics.export(data), _refused_points, 0)

    def close(self) -> None:
        """End what is being sent. From any thread."""
        self._spans.shutdown()  # type: ignore[no-untyped-call]
        self._metrics.shutdown()


class _Answers(HTTPAdapter):
    """Keeps the last answer, as far as `MOST` bytes of it, or why there was none."""

    status: int = 0
    body: bytes = b""
    error: str = ""

    def send(self, request: requests.PreparedRequest, *args: Any, **kwargs: Any) -> requests.Response:
        self.status, self.body, self.error = 0, b"", ""
        kwargs["stream"] = True
        try:
            response = super().send(request, *args, **kwargs)
            self.status, self.body = response.status_code, response.raw.read(MOST + 1, decode_content=True)
            response.raw.close()
        except Exception as error:
            self.error = redacted_within(f"{type(error).__name__}: {error}")
            raise
        response.raw = io.BytesIO(self.body)
        return response

    def of(self, export: Callable[[], object], refused: Callable[[bytes], tuple[int, str]], count: int) -> Sent:
        """Export `count` spans, or metrics, and return how that ended, by the last answer."""
        self.status, self.body, self.error = 0, b"", ""
        result = export()
        if not 200 <= self.status < 300:
            if not self.status:
                return Sent(error=self.error or f"nothing was sent: {result}", again=True)
            text = redacted_within(self.body[:SHOWN].decode("utf-8", "replace")).strip()
            said = f"HTTP {self.status}" + (f": {text}" if text.isprintable() and text else "")
            # Whoever says that a request is wrong says the same of it the next time.
            wrong = 400 <= self.status < 500 and self.status not in (401, 403, 404, 408, 429)
            return Sent(error=said, again=not wrong, refused=count if wrong else 0)
        if len(self.body) > MOST:
            return Sent(error=f"HTTP {self.status} with more than {MOST} bytes, which is no answer of OTLP", again=True)
        try:
            number, why = refused(self.body)
        except Exception as error:  # noqa: BLE001  # whatever protobuf raises for what is none
            return Sent(error=f"HTTP {self.status}, and no answer of OTLP ({type(error).__name__})", again=True)
        return Sent(error=f"{number} refused: {why[:SHOWN]}" if number else "", refused=number)


def _refused_spans(body: bytes) -> tuple[int, str]:
    said = ExportTraceServiceResponse.FromString(body).partial_success
    return said.rejected_spans, said.error_message


def _refused_points(body: bytes) -> tuple[int, str]:
    said = ExportMetricsServiceResponse.FromString(body).partial_success
    return said.rejected_data_points, said.error_message


def _session(answers: _Answers) -> requests.Session:
    session = requests.Session()
    session.mount("http://", answers)
    session.mount("https://", answers)
    return session


def _quiet() -> None:
    """Keep what exporters say of each try from stderr: it is told once, as an event."""
    log = logging.getLogger("opentelemetry.exporter")
    if not log.handlers:
        log.addHandler(logging.NullHandler())
    log.propagate = False


def _resource(run: str, node: str) -> Resource:
    """Return the resource; OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES name the service, and add to it."""
    given = Resource.create({"elastic3d.run": run, "elastic3d.node": node, "service.instance.id": node})
    named = str(given.attributes.get("service.name") or "")
    own = {"service.version": version("elastic3d")}
    # The SDK's default is the name of the interpreter.
    return given.merge(Resource({**own, **({"service.name": SERVICE} if named.startswith("unknown_service") else {})}))


def _readable(span: TraceSpan, resource: Resource, scope: InstrumentationScope) -> ReadableSpan:
    def context(id: bytes, *, remote: bool) -> SpanContext:
        trace, flags = int.from_bytes(span.trace, "big"), TraceFlags(TraceFlags.SAMPLED)
        return SpanContext(trace, int.from_bytes(id, "big"), is_remote=remote, trace_flags=flags)

    return ReadableSpan(
        name=span.name,
        context=context(span.id, remote=False),
        parent=context(span.parent, remote=True) if span.parent else None,
        resource=resource,
        attributes=span.attributes,
        status=Status(StatusCode.ERROR, span.error) if span.error else Status(StatusCode.UNSET),
        start_time=round(span.start * 1e9),
        end_time=round(span.end * 1e9),
        instrumentation_scope=scope,
    )


def _sdk_metrics(values: Iterable[MetricValue], since: int, at: int) -> Iterable[sdk.Metric]:
    by_name: dict[str, list[MetricValue]] = defaultdict(list)
    for value in values:
        by_name[value.name].append(value)
    for name, metric in METRICS.items():
        if by_name[name]:
            called, unit = name_and_unit(metric)
            yield sdk.Metric(called, metric.help, unit, _data(metric, by_name[name], since, at))


def _data(metric: Metric, values: Sequence[MetricValue], since: int, at: int) -> sdk.DataT:
    def attributes(value: MetricValue) -> dict[str, str]:
        return dict(zip((label.name for label in metric.labels), value.labels, strict=True))

    cumulative = sdk.AggregationTemporality.CUMULATIVE
    if metric.kind in (MetricKind.GAUGE, MetricKind.COUNTER):
        points = []
        for value in values:
            assert isinstance(value.value, float)
            points.append(sdk.NumberDataPoint(attributes(value), since, at, value.value))
        if metric.kind is MetricKind.GAUGE:
            return sdk.Gauge(points)
        return sdk.Sum(points, cumulative, is_monotonic=True)
    spread = []
    for value in values:
        assert isinstance(value.value, Distribution)
        counts = [round(count) for count in value.value.counts]
        spread.append(
            sdk.HistogramDataPoint(
                attributes=attributes(value),
                start_time_unix_nano=since,
                time_unix_nano=at,
                count=counts[-1],
                sum=value.value.sum,
                # A summary has one bucket, for all.
                bucket_counts=[count - below for below, count in zip([0, *counts], counts, strict=False)],
                explicit_bounds=list(metric.buckets),
                # Not known; the encoder leaves them out.
                min=None,  # type: ignore[arg-type]
                max=None,  # type: ignore[arg-type]
            )
        )
    return sdk.Histogram(spread, cumulative)

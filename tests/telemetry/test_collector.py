"""Spans and metrics reach a collector as they were made; how an export ended is read from the answer."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from importlib.metadata import version

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTracePartialSuccess,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.metrics.v1.metrics_pb2 import AGGREGATION_TEMPORALITY_CUMULATIVE
from opentelemetry.proto.trace.v1.trace_pb2 import Status

from chaos.machine.processes import free_port
from elastic3d.metrics.recording import Distribution, MetricRecorder, MetricValue
from elastic3d.telemetry.address import CollectorAddress
from elastic3d.telemetry.collector import MOST, OtlpCollector
from elastic3d.telemetry.exporting import Sent
from elastic3d.telemetry.span import Trace
from tests.telemetry.histories import LOSS, spans_of
from tests.telemetry.receiver import METRICS, TRACES, Answer, Receiver, plain, reply

RUN, NODE = "gpt-1b", "node \N{GREEK SMALL LETTER ALPHA}"


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    # Whatever the machine is busy with.
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "20")
    # Some tests close it, and the system is to give its port to nobody then.
    with Receiver(port=free_port()) as one:
        yield one


def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have collectors give up where they would try again for as long as they may."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "2")


def collector(url: str = "") -> OtlpCollector:
    return OtlpCollector(CollectorAddress(url=url), run=RUN, node=NODE, since=90.0)


def test_spans_arrive_with_their_parents_and_times(receiver: Receiver) -> None:
    """Ids are those that all nodes make; times are whole nanoseconds since the epoch."""
    made = spans_of(RUN, "b", LOSS["b"])
    assert collector(receiver.url).spans(made) == Sent()
    assert [span.name for span in receiver.spans] == [span.name for span in made]
    for got, want in zip(receiver.spans, made, strict=True):
        assert (got.trace_id, got.span_id, got.parent_span_id) == (want.trace, want.id, want.parent)
        assert (got.start_time_unix_nano, got.end_time_unix_nano) == (round(want.start * 1e9), round(want.end * 1e9))
        assert plain(got.attributes) == dict(want.attributes)
    begin = next(span for span in receiver.spans if span.name == "trainer.begin")
    assert begin.parent_span_id == Trace(run=RUN, generation=1).span("beginning")
    crashed = next(span for span in receiver.spans if span.name == "trainer")
    assert (crashed.status.code, crashed.status.message) == (Status.STATUS_CODE_ERROR, "signal 6")
    (resource,) = receiver.resources
    assert resource["service.name"] == "elastic3d"
    assert (resource["elastic3d.run"], resource["elastic3d.node"]) == (RUN, NODE)
    assert resource["service.version"] == version("elastic3d")


def test_metrics_arrive_with_their_values(receiver: Receiver) -> None:
    """Counters are cumulative from the node's start, histograms have the table's bounds, a summary one bucket."""
    recorder = MetricRecorder("a")
    recorder.observe("generation.sealed", {"nodes": ["a"], "spares": [], "leader": "a", "cause": "join"}, 0.0)
    for step, seconds in ((1, 0.03), (2, 7.0)):
        fields = {"rank": 0, "step": step, "seconds": seconds, "samples": [8 * step - 8, 8 * step], "loss": "0x1.8p+1"}
        recorder.observe("step.committed", fields, float(step))
    answers = MetricValue(name="elastic3d_etcd_answer_seconds", labels=(), value=Distribution(counts=(3.0,), sum=0.25))
    values = [one for one in recorder.values() if one.name != answers.name]
    assert collector(receiver.url).metrics([*values, answers], 100.0) == Sent()
    samples = receiver.latest["elastic3d.samples"].sum
    assert (samples.is_monotonic, samples.aggregation_temporality) == (True, AGGREGATION_TEMPORALITY_CUMULATIVE)
    (point,) = samples.data_points
    assert (point.as_double, point.start_time_unix_nano, point.time_unix_nano) == (16.0, 90 * 10**9, 100 * 10**9)
    assert receiver.latest["elastic3d.loss"].gauge.data_points[0].as_double == 3.0
    causes = {
        plain(one.attributes)["cause"]: one.as_double
        for one in receiver.latest["elastic3d.generations"].sum.data_points
    }
    assert causes["join"] == 1
    assert causes["death"] == 0
    steps = receiver.latest["elastic3d.step_duration"]
    (spread,) = steps.histogram.data_points
    assert (steps.unit, spread.count, spread.sum) == ("s", 2, pytest.approx(7.03))
    assert sum(spread.bucket_counts) == 2
    assert len(spread.bucket_counts) == len(spread.explicit_bounds) + 1
    assert spread.bucket_counts[list(spread.explicit_bounds).index(0.05)] == 1
    assert not spread.HasField("min")
    (etcd,) = receiver.latest["elastic3d.etcd_answer"].histogram.data_points
    assert (etcd.count, etcd.sum, list(etcd.bucket_counts), list(etcd.explicit_bounds)) == (3, 0.25, [3], [])


def test_the_environment_says_where_and_how(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the specification of OpenTelemetry has it; the node's own names stay."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "api-key=k%201,other=x")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "training")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=lab,elastic3d.node=z")
    one = collector()
    assert one.spans(spans_of(RUN, "a", LOSS["a"][:4])) == Sent()
    assert one.metrics(MetricRecorder("a").values(), 100.0) == Sent()
    assert [headers["api-key"] for headers in receiver.headers] == ["k 1", "k 1"]
    assert {headers["content-encoding"] for headers in receiver.headers} == {"gzip"}
    for resource in receiver.resources:
        assert resource["service.name"] == "training"
        assert resource["deployment.environment.name"] == "lab"
        assert resource["elastic3d.node"] == NODE
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", f"{receiver.url}{METRICS}x")
    assert collector().spans(spans_of(RUN, "a", LOSS["a"][:4])).error == "HTTP 404: no such path"


def raw(data: bytes, *, hold: float = 0.0) -> Answer:
    """Return an answer of bytes that are no HTTP, or none for a while."""

    def answer(call: BaseHTTPRequestHandler) -> None:
        time.sleep(hold)
        with contextlib.suppress(OSError):
            call.wfile.write(data)
        call.close_connection = True

    return answer


def said(status: int, body: bytes = b"", **headers: str) -> Answer:
    """Return an answer of a status and a body."""
    return lambda call: reply(call, status, body, **headers)


def endless(call: BaseHTTPRequestHandler) -> None:
    """Answer for as long as somebody reads."""
    call.send_response(200)
    call.end_headers()
    call.close_connection = True
    with contextlib.suppress(OSError):
        while True:
            call.wfile.write(b"x" * MOST)


REFUSED = ExportTraceServiceResponse(
    partial_success=ExportTracePartialSuccess(rejected_spans=2, error_message="too old")
).SerializeToString()

ANSWERS: dict[str, tuple[Answer, Sent | str]] = {
    "500": (said(500, b"out of order\n"), Sent(error="HTTP 500: out of order", again=True)),
    "503": (said(503, b"busy", Retry_After="60"), Sent(error="HTTP 503: busy", again=True)),
    "404": (said(404, b"\0\1"), Sent(error="HTTP 404", again=True)),
    "401": (said(401, b"who"), Sent(error="HTTP 401: who", again=True)),
    "302": (said(302, b"", Location="http://127.0.0.1:1/"), Sent(error="HTTP 302", again=True)),
    "400": (said(400, b"bad"), Sent(error="HTTP 400: bad", again=False, refused=4)),
    "413": (said(413, b"large"), Sent(error="HTTP 413: large", again=False, refused=4)),
    "partly": (said(200, REFUSED), Sent(error="2 refused: too old", refused=2)),
    "page": (said(200, b"<html>login</html>"), "no answer of OTLP"),
    "endless": (endless, "more than 65536 bytes"),
    "no http": (raw(b"\xff\xfe\0garbage\r\n\r\n"), "BadStatusLine"),
    "half": (raw(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nabc"), "IncompleteRead"),
    "hung up": (raw(b""), "RemoteDisconnected"),
    "slow": (raw(b"", hold=3.0), "Timeout"),
}


TRIED_AGAIN = ("500", "503", "no http", "half", "hung up", "slow")


@pytest.mark.parametrize("kind", ANSWERS)
def test_what_became_of_spans_is_read_from_the_answer(
    kind: str, receiver: Receiver, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether they may be taken later, how many were refused, and why; in bounded time and memory, and in silence."""
    if kind in TRIED_AGAIN:
        soon(monkeypatch)
    receiver.answer, want = ANSWERS[kind]
    begun = time.monotonic()
    sent = collector(receiver.url).spans(spans_of(RUN, "a", LOSS["a"][:2] + LOSS["a"][4:6] + LOSS["a"][9:10]))
    assert time.monotonic() - begun < 10
    if isinstance(want, Sent):
        assert sent == want
    else:
        assert want in sent.error
        assert sent.again
    out, err = capfd.readouterr()
    assert (out, err) == ("", "")
    assert logging.getLogger("opentelemetry").level == logging.NOTSET


def test_the_query_of_an_address_is_not_told(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither by whoever answers with it, nor where nobody answers."""
    soon(monkeypatch)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", f"{receiver.url}{TRACES}?api_key=secret")
    receiver.answer = lambda call: reply(call, 404, f"Cannot POST {call.path}".encode())
    one, spans = collector(), spans_of(RUN, "a", LOSS["a"][:5])
    assert one.spans(spans).error == f"HTTP 404: Cannot POST {TRACES}?..."
    receiver.close()
    sent = one.spans(spans)
    assert f"{TRACES}?..." in sent.error
    assert "secret" not in sent.error


def test_a_collector_that_is_not_there_is_named(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody listens; the next export is taken as soon as somebody does."""
    soon(monkeypatch)
    url = receiver.url
    one = collector(url)
    receiver.close()
    sent = one.spans(spans_of(RUN, "a", LOSS["a"][:5]))
    assert sent.again
    assert "ConnectionError" in sent.error
    again = Receiver(port=int(url.rpartition(":")[2]))
    try:
        assert one.spans(spans_of(RUN, "a", LOSS["a"][:5])) == Sent()
    finally:
        again.close()
    one.close()
    one.close()

"""Telemetry never waits for a collector, keeps a bounded number of spans, and says once that something is wrong."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest

from elastic3d.metrics.recording import MetricRecorder
from elastic3d.telemetry.address import CollectorAddress
from elastic3d.telemetry.collector import OtlpCollector
from elastic3d.telemetry.exporting import BATCH, Signal, TelemetryExporter
from elastic3d.telemetry.span import NodeTrace, TraceSpan
from tests.telemetry.receiver import TRACES, Answer, Receiver, reply

RECORDER = MetricRecorder("a")


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the machine is busy with: what got no answer in time is sent twice."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "20")


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within its timeout an exporter tries again by itself."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as one:
        yield one


class Sending:
    """An exporter to a receiver, and the events that it emits."""

    def __init__(self, url: str, *, every: float = 600.0, kept: int = 100) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        collector = OtlpCollector(CollectorAddress(url=url), run="r", node="a", since=0.0)
        self.exporter = TelemetryExporter(
            collector, RECORDER.values, self._emit, every=every, delay=0.05, rest=0.05, kept=kept
        )

    def _emit(self, name: str, **fields: Any) -> None:
        self.events.append((name, fields))

    def names(self) -> list[str]:
        return [name for name, _ in self.events]


@pytest.fixture
def sending() -> Iterator[Callable[..., Sending]]:
    made: list[Sending] = []

    def make(url: str, **more: Any) -> Sending:
        made.append(Sending(url, **more))
        return made[-1]

    yield make
    for one in made:
        one.exporter.close(5.0)


def numbered(first: int, stop: int) -> Sequence[TraceSpan]:
    """Return spans whose names are numbers."""
    trace = NodeTrace("r", "a")
    return [trace.own(str(number), 1, number, number, {}) for number in range(first, stop)]


def names(receiver: Receiver) -> list[int]:
    return [int(span.name) for span in receiver.spans]


def only(status: int, path: str = TRACES) -> Answer:
    """Return an answer to one path; the others are taken, and not decoded."""
    return lambda call: reply(call, status if call.path == path else 200, b"")


def test_spans_and_metrics_go_out_by_themselves(receiver: Receiver, sending: Callable[..., Sending]) -> None:
    """Each span once and in order, in as many requests as they take; metrics at their interval."""
    one = sending(receiver.url, every=0.2, kept=9999)
    one.exporter.put(numbered(0, 2 * BATCH + 3))
    receiver.until(lambda: len(receiver.spans) == 2 * BATCH + 3)
    one.exporter.put(numbered(2 * BATCH + 3, 2 * BATCH + 5))
    receiver.until(lambda: len(receiver.spans) == 2 * BATCH + 5 and "elastic3d.steps" in receiver.latest)
    assert names(receiver) == list(range(2 * BATCH + 5))
    assert one.events == []
    assert one.exporter.counts.failures == {Signal.TRACES: 0, Signal.METRICS: 0}


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize(
    "answer", [only(500), only(503), lambda call: call.wfile.write(b"\0" * 99)], ids=["500", "503", "garbage"]
)
def test_what_is_wrong_is_told_once_and_again_when_it_works(
    answer: Answer, receiver: Receiver, sending: Callable[..., Sending]
) -> None:
    """Every try is counted, no span is lost or sent twice, and metrics that work say nothing."""
    one = sending(receiver.url)
    receiver.answer = answer
    one.exporter.put(numbered(0, 3))
    receiver.until(lambda: one.exporter.counts.failures[Signal.TRACES] >= 2)
    one.exporter.put(numbered(3, 5))
    assert one.names() == ["telemetry.failed"]
    fields = one.events[0][1]
    assert (fields["signal"], fields["endpoint"]) == ("traces", receiver.url)
    receiver.answer = None
    receiver.until(lambda: "telemetry.mended" in one.names())
    receiver.until(lambda: len(receiver.spans) == 5)
    assert names(receiver) == list(range(5))
    assert one.names() == ["telemetry.failed", "telemetry.mended"]
    assert one.events[1][1]["failures"] >= 2
    assert one.events[1][1]["lost"] is None


@pytest.mark.usefixtures("short")
def test_a_collector_that_comes_later_gets_the_newest_spans(
    refusing_port: Callable[[], int], sending: Callable[..., Sending]
) -> None:
    """Of more than are kept the oldest are lost, and counted."""
    url = f"http://127.0.0.1:{refusing_port()}"
    one = sending(url, kept=10)
    for number in range(25):
        one.exporter.put(numbered(number, number + 1))
    deadline = time.monotonic() + 20
    while not one.events and time.monotonic() < deadline:
        time.sleep(0.01)
    assert one.names() == ["telemetry.failed"]
    assert one.exporter.counts.lost == 15
    one.exporter.close(5.0)
    # Of the metrics it is told when they fail for the first time, at the end.
    assert one.names() == ["telemetry.failed", "telemetry.failed", "telemetry.unsent"]
    assert [fields.get("signal") for _, fields in one.events] == ["traces", "metrics", None]
    assert one.events[2][1]["spans"] == 10
    assert one.exporter.counts.lost == 25


def test_a_batch_that_is_refused_is_not_sent_again(receiver: Receiver, sending: Callable[..., Sending]) -> None:
    """It would be refused again, and hold up all others."""
    one = sending(receiver.url)
    receiver.answer = only(400)
    one.exporter.put(numbered(0, 4))
    receiver.until(lambda: one.exporter.counts.lost == 4)
    receiver.answer = None
    one.exporter.put(numbered(4, 6))
    receiver.until(lambda: "telemetry.mended" in one.names())
    assert names(receiver) == [4, 5]
    assert one.events[1][1] == {"signal": "traces", "failures": 1, "lost": 4}


def test_what_is_left_is_sent_at_the_end(receiver: Receiver, sending: Callable[..., Sending]) -> None:
    """Spans and the last values of metrics, without waiting for their times; nothing after that."""
    one = sending(receiver.url)
    one.exporter.put(numbered(0, BATCH - 420))
    one.exporter.close(20.0)
    one.exporter.close(20.0)
    assert len(receiver.spans) == BATCH - 420
    assert "elastic3d.steps" in receiver.latest
    assert one.events == []
    assert "elastic3d-telemetry" not in {thread.name for thread in threading.enumerate()}


def test_a_collector_that_hangs_holds_nobody_up(receiver: Receiver, sending: Callable[..., Sending]) -> None:
    """Putting spans takes no time, nor does counting; the end of the node waits as long as it says, and tells."""
    hold = threading.Event()

    def hang(call: BaseHTTPRequestHandler) -> None:
        hold.wait(30)
        call.close_connection = True

    receiver.answer = hang
    one = sending(receiver.url, kept=5000)
    one.exporter.put(numbered(0, 1))
    receiver.until(lambda: receiver.requests == 1)
    begun = time.monotonic()
    for number in range(1000):
        one.exporter.put(numbered(number, number + 1))
        assert one.exporter.counts.lost == 0
    assert time.monotonic() - begun < 2
    begun = time.monotonic()
    one.exporter.close(0.5)
    assert time.monotonic() - begun < 3
    assert one.names()[-1] == "telemetry.unsent"
    assert one.events[-1][1]["spans"] == 1001
    hold.set()


def test_silence_is_told_before_it_ends(
    receiver: Receiver, sending: Callable[..., Sending], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer that drips keeps a request from ever timing out."""
    monkeypatch.setattr("elastic3d.telemetry.exporting.SILENT", 0.3)
    hold = threading.Event()

    def drip(call: BaseHTTPRequestHandler) -> None:
        call.send_response(200)
        call.send_header("Content-Length", "1000")
        call.end_headers()
        call.close_connection = True
        with contextlib.suppress(OSError):
            while not hold.wait(0.1):
                call.wfile.write(b"\n")

    receiver.answer = drip
    one = sending(receiver.url)
    one.exporter.put(numbered(0, 1))

    def said() -> bool:
        one.exporter.look()
        return bool(one.events)

    receiver.until(said)
    one.exporter.look()
    assert one.names() == ["telemetry.failed"]
    assert "no answer for" in one.events[0][1]["error"]
    hold.set()


def test_metrics_that_cannot_be_read_are_a_failure_and_no_more(
    receiver: Receiver, sending: Callable[..., Sending]
) -> None:
    """Spans go on."""
    one = sending(receiver.url, every=0.1)
    one.exporter._values = lambda: 1 // 0  # type: ignore[assignment, return-value]
    receiver.until(lambda: one.exporter.counts.failures[Signal.METRICS] >= 2)
    one.exporter.put(numbered(0, 1))
    receiver.until(lambda: len(receiver.spans) == 1)
    assert one.names() == ["telemetry.failed"]
    assert "ZeroDivisionError" in one.events[0][1]["error"]

"""The telemetry of a node: spans made of its keeper's events, sent with its metrics to a collector.

Whatever goes wrong here is counted, told once, and costs the job nothing.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from elastic3d.clock import SYSTEM, Clock
from elastic3d.metrics.recording import MetricValue
from elastic3d.rendezvous.settings import Settings
from elastic3d.telemetry.address import CollectorAddress
from elastic3d.telemetry.exporting import ExportCounts, TelemetryExporter
from elastic3d.telemetry.span import TraceSpan
from elastic3d.telemetry.spans import SpanMaker

PATIENCE = 5.0
"""Seconds that the end of a node waits for what is not sent."""

MOST_BEFORE = 1000
"""Spans that are kept before sending begins: a node has hardly any then."""


class NodeTelemetry:
    """One keeper's telemetry, for all generations that it lives through. Thread-safe.

    failed: called for each exception that is a bug of elastic3d.
    """

    def __init__(
        self,
        settings: Settings,
        address: CollectorAddress,
        *,
        failed: Callable[[Exception], None],
        clock: Clock = SYSTEM,
    ) -> None:
        self._settings, self._address, self._failed, self._clock = settings, address, failed, clock
        self._lock = threading.Lock()
        self._maker = SpanMaker(settings.run_id, settings.node, secrets.token_hex(4))
        self._since = clock.wall()
        self._before: list[TraceSpan] = []
        self._exporter: TelemetryExporter | None = None
        self._emit: Callable[..., None] = lambda name, **fields: None

    def begin(self, values: Callable[[], Iterable[MetricValue]], emit: Callable[..., None]) -> None:
        """Begin to send; ConfigurationError where nothing can be. values: the metrics. emit: writes events."""
        from elastic3d.telemetry.collector import OtlpCollector

        self._emit = emit
        settings, every = self._settings, self._address.interval
        collector = OtlpCollector(self._address, run=settings.run_id, node=settings.node, since=self._since)
        with self._lock:
            self._exporter = TelemetryExporter(collector, values, emit, every=every, clock=self._clock)
            self._exporter.put(self._before)
            self._before = []
        self._emit("telemetry.started", endpoint=collector.endpoint, every=every)

    @property
    def counts(self) -> ExportCounts | None:
        """What failed so far, None before sending begins."""
        return self._exporter.counts if self._exporter is not None else None

    def observe(self, event: str, fields: Mapping[str, Any]) -> None:
        """Take an event. Never raises, and never waits for a collector."""
        try:
            with self._lock:
                self._put(self._maker.observe(event, fields, self._clock.wall()))
        except Exception as error:  # noqa: BLE001  # an event is written on behalf of training, which must go on
            self._failed(error)

    def stepped(self, generation: int) -> None:
        """Take a step of the node's first slot, after its event. Never raises."""
        try:
            with self._lock:
                self._put(self._maker.stepped(generation, self._clock.wall()))
        except Exception as error:  # noqa: BLE001  # as above
            self._failed(error)

    def look(self) -> None:
        """Report a collector that does not answer; to be called now and then."""
        if self._exporter is not None:
            self._exporter.look()

    def close(self) -> None:
        """Send what is left, for a bounded time. Idempotent."""
        with self._lock:
            if self._exporter is None:
                return
            try:
                self._put(self._maker.end(self._clock.wall()))
            except Exception as error:  # noqa: BLE001  # as above
                self._failed(error)
        self._exporter.close(PATIENCE)

    def _put(self, spans: list[TraceSpan]) -> None:
        if self._exporter is not None:
            self._exporter.put(spans)
        elif len(self._before) < MOST_BEFORE:
            self._before += spans

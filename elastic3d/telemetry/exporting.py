"""The thread that sends a node's telemetry: spans soon after they end, metrics at each interval.

Nobody waits for it but the end of the node, and that for a bounded time. A collector that is away, slow, or answers
nonsense costs a bounded number of spans in memory, and is told once, until it takes what it is sent.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from elastic3d import threads
from elastic3d.clock import SYSTEM, Clock
from elastic3d.metrics.recording import MetricValue
from elastic3d.telemetry.span import TraceSpan

DELAY = 2.0
"""Seconds for which spans are gathered."""

KEPT, BATCH = 8192, 512
"""Spans that are kept at most while they cannot be sent, the newest; and those of one request."""

SHORTEST, LONGEST = 2.0, 60.0
"""Seconds from a failure to the next try: doubled with each failure in a row, up to the longer one."""

SILENT = 30.0
"""Seconds without an answer after which that is told."""


class Signal(StrEnum):
    """What is sent."""

    TRACES = "traces"
    METRICS = "metrics"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """How an export ended. error: "" where it was taken. again: it may be taken later. refused: spans that were not."""

    error: str = ""
    again: bool = False
    refused: int = 0


class Collector(Protocol):
    """Takes spans and metrics, on one thread. endpoint: for people."""

    endpoint: str

    def spans(self, spans: Sequence[TraceSpan]) -> Sent:
        """Send spans; blocks for the timeout of the exporter."""
        ...

    def metrics(self, values: Iterable[MetricValue], at: float) -> Sent:
        """Send the values of metrics at a wall time; blocks as long."""
        ...

    def close(self) -> None:
        """End what is being sent. From any thread."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportCounts:
    """failures: exports that were not taken, by signal. lost: spans that no collector has, and none will."""

    failures: dict[Signal, int]
    lost: int


@dataclass(slots=True)
class _State:
    """How one signal fares. tried: failures in a row. reported: as an event. lost, failures: since then."""

    due: float = 0.0
    tried: int = 0
    reported: bool = False
    failures: int = 0
    lost: int = 0
    error: str = ""


class TelemetryExporter:
    """Sends to a collector until `close`. Methods are for any thread, and none of them blocks but `close`.

    values: called for each export of metrics, on the exporter's thread. emit: takes the events, on any thread. every:
    seconds from one of these to the next. delay: for which spans are gathered. rest: from the first failure in a row to
    the next try. clock: for deadlines; waiting takes real time.
    """

    def __init__(
        self,
        collector: Collector,
        values: Callable[[], Iterable[MetricValue]],
        emit: Callable[..., None],
        *,
        every: float,
        delay: float = DELAY,
        rest: float = SHORTEST,
        kept: int = KEPT,
        clock: Clock = SYSTEM,
    ) -> None:
        self._collector, self._values, self._emit = collector, values, emit
        self._every, self._delay, self._rest, self._kept, self._clock = every, delay, rest, kept, clock
        self._changed = threading.Condition()
        self._spans: deque[TraceSpan] = deque()
        self._states = {signal: _State() for signal in Signal}
        self._states[Signal.METRICS].due = clock.monotonic() + every
        self._failures, self._lost = dict.fromkeys(Signal, 0), 0
        self._busy: tuple[Signal, float] | None = None
        self._closing = False
        self._thread = threads.start(self._run, name="elastic3d-telemetry", edge=threads.Edge.AGAIN)

    def put(self, spans: Sequence[TraceSpan]) -> None:
        """Send spans in a while; beyond the bound, the oldest are lost."""
        if not spans:
            return
        with self._changed:
            if not self._spans:
                state = self._states[Signal.TRACES]
                state.due = max(state.due, self._clock.monotonic() + self._delay)
            self._spans.extend(spans)
            while len(self._spans) > self._kept:
                self._spans.popleft()
                self._lose(1)
            self._changed.notify()

    @property
    def counts(self) -> ExportCounts:
        """What failed so far."""
        with self._changed:
            return ExportCounts(failures=dict(self._failures), lost=self._lost)

    def look(self) -> None:
        """Report a collector that does not answer; to be called now and then."""
        busy = self._busy
        if busy is not None and self._clock.monotonic() - busy[1] >= SILENT:
            self._tell(busy[0], f"no answer for {SILENT:.0f} s")

    def close(self, patience: float) -> None:
        """Send what there is, within `patience` seconds, and stop. Idempotent."""
        with self._changed:
            if self._closing:
                return
            self._closing = True
            self._changed.notify()
        self._thread.join(timeout=patience)
        if self._thread.is_alive():
            # A request that hangs nevertheless is left to the end of the process.
            self._collector.close()
        with self._changed:
            unsent = len(self._spans)
            self._lose(unsent)
            self._spans.clear()
        if unsent:
            error = self._states[Signal.TRACES].error or f"no answer within {patience:g} s"
            self._emit("telemetry.unsent", spans=unsent, error=error)

    # On the exporter's thread.

    def _run(self) -> None:
        while True:
            signal = self._next()
            if signal is None:
                break
            self._send(signal)
        # The end: once each, whatever is due.
        while self._spans and self._send(Signal.TRACES):
            pass
        self._send(Signal.METRICS)
        self._collector.close()

    def _next(self) -> Signal | None:
        """Wait for what is due next; None at the end."""
        with self._changed:
            while True:
                if self._closing:
                    return None
                now = self._clock.monotonic()
                waiting = [Signal.METRICS, *([Signal.TRACES] if self._spans else [])]
                first = min(waiting, key=lambda signal: self._states[signal].due)
                left = self._states[first].due - now
                if left <= 0:
                    return first
                self._changed.wait(timeout=left)

    def _send(self, signal: Signal) -> bool:
        """Send one batch; return whether it was dealt with, and need not be sent again."""
        with self._changed:
            batch = [self._spans[place] for place in range(min(BATCH, len(self._spans)))]
            lost_before = self._lost
        self._busy = (signal, self._clock.monotonic())
        try:
            if signal is Signal.TRACES:
                sent = self._collector.spans(batch)
            else:
                sent = self._collector.metrics(self._values(), self._clock.wall())
        except Exception as error:  # noqa: BLE001  # whatever the SDK raises for a batch, it does so again
            sent = Sent(error=f"{type(error).__name__}: {error}", refused=len(batch))
        self._busy = None
        with self._changed:
            if signal is Signal.TRACES and not sent.again:
                # The oldest may have been dropped meanwhile for want of room.
                for _ in range(min(len(self._spans), len(batch) - (self._lost - lost_before))):
                    self._spans.popleft()
                self._lose(sent.refused)
        self._settle(signal, sent)
        return not sent.again

    def _settle(self, signal: Signal, sent: Sent) -> None:
        state, now = self._states[signal], self._clock.monotonic()
        if sent.error:
            with self._changed:
                state.failures += 1
                self._failures[signal] += 1
                state.tried += 1
                rest = min(LONGEST, self._rest * 2 ** min(state.tried - 1, 16))
                pause = rest if signal is Signal.TRACES else max(rest, self._every)
                state.due, state.error = now + pause, sent.error
            self._tell(signal, sent.error)
            return
        with self._changed:
            reported, failures, lost = state.reported, state.failures, state.lost
            more = len(self._spans) >= BATCH
            pause = self._every if signal is Signal.METRICS else 0.0 if more else self._delay
            self._states[signal] = _State(due=now + pause)
        if reported:
            self._emit("telemetry.mended", signal=str(signal), failures=failures, lost=lost or None)

    def _tell(self, signal: Signal, error: str) -> None:
        with self._changed:
            reported, self._states[signal].reported = self._states[signal].reported, True
        if not reported:
            kept = f"up to {self._kept} spans are kept" if signal is Signal.TRACES else "counters go on counting"
            self._emit(
                "telemetry.failed",
                signal=str(signal),
                endpoint=self._collector.endpoint,
                error=error,
                detail=f"training goes on; {kept}, and are sent when it works again",
            )

    def _lose(self, spans: int) -> None:
        """Count spans that are lost. The lock is held."""
        self._lost += spans
        self._states[Signal.TRACES].lost += spans

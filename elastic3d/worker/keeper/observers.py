"""What a keeper's events are told to, beside its journal: metrics that are served, telemetry that is sent."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from elastic3d.port import StepRecord
from elastic3d.rendezvous.settings import Settings
from elastic3d.worker.keeper.node_metrics import LiveNode, NodeMetrics
from elastic3d.worker.keeper.node_telemetry import NodeTelemetry
from elastic3d.worker.keeper.trainer_group import TrainerGroup
from elastic3d.worker.options import RunOptions


class NodeObservers:
    """One keeper's metrics, served or sent or both, and its spans. Thread-safe."""

    def __init__(self, metrics: NodeMetrics, telemetry: NodeTelemetry | None) -> None:
        self._metrics, self._telemetry = metrics, telemetry

    def begin(self, live: LiveNode, emit: Callable[..., None]) -> None:
        """Begin to serve and to send; ConfigurationError where that cannot be. emit: writes events."""
        telemetry = self._telemetry
        if telemetry is not None:
            live = replace(live, exports=lambda: telemetry.counts)
        self._metrics.serve(live, emit)
        if telemetry is not None:
            telemetry.begin(self._metrics.values, emit)

    def observe(self, event: str, fields: Mapping[str, Any]) -> None:
        """Take an event. Never raises."""
        self._metrics.observe(event, fields)
        if self._telemetry is not None:
            self._telemetry.observe(event, fields)

    def stepped(self, record: StepRecord, group: TrainerGroup) -> None:
        """Take a step of the node's first slot, after its event. Never raises."""
        self._metrics.stepped(record, group)
        if self._telemetry is not None:
            self._telemetry.stepped(record.generation)

    def look(self) -> None:
        """Report what is due even if nothing has happened."""
        if self._telemetry is not None:
            self._telemetry.look()

    def finish(self) -> None:
        """Send what is left, for a bounded time. Idempotent."""
        if self._telemetry is not None:
            self._telemetry.close()

    def close(self) -> None:
        """Send what is left, and serve no more. Idempotent."""
        self.finish()
        self._metrics.close()


def observers_of(settings: Settings, options: RunOptions) -> NodeObservers | None:
    """Return what a run asks for, None where it asks for nothing."""
    if options.metrics is None and options.telemetry is None:
        return None
    metrics = NodeMetrics(settings, options.metrics)
    telemetry = options.telemetry
    return NodeObservers(
        metrics, NodeTelemetry(settings, telemetry, failed=metrics.failed) if telemetry is not None else None
    )

"""The metrics of a node: counted from its keeper's events, read from its figures at each scrape, served for Prometheus.

Whatever goes wrong here is counted, told once, and costs the job nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from elastic3d.clock import SYSTEM, Clock
from elastic3d.etcd.session import Answers
from elastic3d.health import sheet
from elastic3d.log import process_log
from elastic3d.membership.records import Pulse
from elastic3d.metrics.address import MetricsAddress
from elastic3d.metrics.exposition import Exposition
from elastic3d.metrics.memory import resident
from elastic3d.metrics.recording import Distribution, MetricRecorder, MetricValue
from elastic3d.metrics.server import MetricsServer
from elastic3d.port import StepRecord
from elastic3d.rendezvous.settings import Settings
from elastic3d.trust.listening import Refusal
from elastic3d.worker.keeper.injected import NodeProcesses
from elastic3d.worker.keeper.trainer_group import TrainerGroup
from elastic3d.worker.pulse import WELL

STATES = ("active", "spare", "draining")

FAILURES = "elastic3d_metrics_failures_total"


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveNode:
    """What is asked of a keeper at each scrape, on the server's thread; nothing of it blocks.

    pulse: how the node is, None before it has joined. processes: its own. awaited: how many nodes the job waits for, as
    far as this one leads. answers: how etcd has answered, None while nobody has asked it. goodput: node-seconds that it
    has counted as leader, by category.
    """

    pulse: Callable[[], Pulse | None]
    processes: Callable[[], NodeProcesses]
    awaited: Callable[[], int]
    answers: Callable[[], Answers | None]
    goodput: Callable[[], Mapping[str, float]]


class NodeMetrics:
    """One keeper's metrics, for all generations that it lives through. Thread-safe."""

    def __init__(self, settings: Settings, address: MetricsAddress, *, clock: Clock = SYSTEM) -> None:
        self._settings, self._address, self._clock = settings, address, clock
        self._recorder = MetricRecorder(settings.node)
        self._failures = 0
        self._version = version("elastic3d")
        self._server: MetricsServer | None = None
        self._live: LiveNode | None = None
        self._emit: Callable[..., None] = process_log().emit

    def serve(self, live: LiveNode, emit: Callable[..., None]) -> None:
        """Begin to serve; ConfigurationError where nobody can listen. emit: writes events."""
        self._live, self._emit = live, emit
        exposition = Exposition(self._settings.run_id, self._settings.node, self._values)
        self._server = MetricsServer(
            self._address, exposition.document, own=self._settings.address, failed=self._failed, refused=self._refused
        )
        self._emit("metrics.served", address=self._server.address)

    def close(self) -> None:
        """Serve no more. Idempotent."""
        if self._server is not None:
            self._server.close()

    def observe(self, event: str, fields: Mapping[str, Any]) -> None:
        """Count an event. Never raises."""
        try:
            self._recorder.observe(event, fields, self._clock.monotonic())
        except Exception as error:  # noqa: BLE001  # an event is written on behalf of training, which must go on
            self._failed(error)

    def stepped(self, record: StepRecord, group: TrainerGroup) -> None:
        """Count a step of the node's first slot, after its event. Never raises."""
        try:
            rank, row = group.first_rank, own_row(record, group)
            now = self._clock.monotonic()
            self._recorder.stepped(record.step, now, clean=record.clean, row=row, first=rank == 0)
        except Exception as error:  # noqa: BLE001  # as above
            self._failed(error)

    def _refused(self, refusal: Refusal) -> None:
        self._emit(
            "peer.refused",
            port=refusal.port,
            peer=refusal.peer,
            reason=refusal.reason,
            more=refusal.more or None,
        )

    def _failed(self, error: Exception) -> None:
        self._failures += 1
        if self._failures == 1:
            process_log().emit("metrics.failed", error=f"{type(error).__name__}: {error}")

    # At a scrape.

    def _values(self) -> list[MetricValue]:
        values = {(one.name, one.labels): one for one in self._recorder.values() if one.name != FAILURES}
        for part in (self._own, self._pulse, self._etcd, self._memory, self._goodput):
            try:
                values |= {(one.name, one.labels): one for one in part()}
            except Exception as error:  # noqa: BLE001  # the other parts are there
                self._failed(error)
        return [*values.values(), _value(FAILURES, self._failures)]

    def _own(self) -> Iterator[MetricValue]:
        yield _value("elastic3d_info", 1, self._version)
        if self._live is not None:
            yield _value("elastic3d_nodes_awaited", self._live.awaited())

    def _pulse(self) -> Iterator[MetricValue]:
        pulse = self._live.pulse() if self._live is not None else None
        if pulse is None:
            return
        for state in STATES:
            yield _value("elastic3d_node_state", pulse.state == state, state)
        yield _value("elastic3d_node_healthy", pulse.health == WELL)
        if pulse.state != "spare" and pulse.step >= 0:
            yield _value("elastic3d_snapshot_interval_steps", pulse.snapshot_every)
            if pulse.snapshot_age >= 0:
                yield _value("elastic3d_snapshot_age_seconds", pulse.snapshot_age)
        for ref, step, age in (
            ("latest", pulse.checkpoint_step, pulse.checkpoint_age),
            ("verified", pulse.verified_step, pulse.verified_age),
            ("vetted", pulse.vetted_step, pulse.vetted_age),
        ):
            if age >= 0:
                yield _value("elastic3d_checkpoint_step", step, ref)
                yield _value("elastic3d_checkpoint_age_seconds", age, ref)
        if pulse.watch is not None and pulse.watch.slow_from:
            slow = pulse.watch.slow
            own = [one.rho for one in slow if one.node == self._settings.node]
            yield _value("elastic3d_slow_nodes", len({one.node for one in slow}))
            yield _value("elastic3d_node_slowness_ratio", max([1.0, *own]))

    def _etcd(self) -> Iterator[MetricValue]:
        answers = self._live.answers() if self._live is not None else None
        if answers is not None:
            spread = Distribution(counts=(float(answers.count),), sum=answers.seconds)
            yield MetricValue(name="elastic3d_etcd_answer_seconds", labels=(), value=spread)
            yield _value("elastic3d_etcd_failed_tries_total", answers.failed)

    def _goodput(self) -> Iterator[MetricValue]:
        for category, seconds in self._live.goodput().items() if self._live is not None else ():
            yield _value("elastic3d_goodput_seconds_total", seconds, category)

    def _memory(self) -> Iterator[MetricValue]:
        if self._live is None:
            return
        processes = self._live.processes()
        for process, pids in (("keeper", processes.keepers), ("trainer", tuple(processes.trainers.values()))):
            there, nbytes = resident(pids)
            yield _value("elastic3d_processes", there, process)
            for kind, size in nbytes.items():
                yield _value("elastic3d_memory_bytes", size, process, kind)


def own_row(record: StepRecord, group: TrainerGroup) -> sheet.Row:
    """Return the row of the node's first rank that rode in a step's vote, () where none did."""
    speakers = sheet.speakers(record.step, group.generation.world)
    return dict(zip(speakers, record.sheets, strict=False)).get(group.first_rank, ())


def _value(name: str, value: float, *labels: str) -> MetricValue:
    return MetricValue(name=name, labels=labels, value=float(value))

"""A node's telemetry: made of its journal's events, sent with its metrics, and no concern of the keeper's."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic3d.etcd.session import Answers
from elastic3d.membership.policy import Policy
from elastic3d.metrics.address import metrics_address
from elastic3d.rendezvous.settings import Settings
from elastic3d.telemetry.address import CollectorAddress
from elastic3d.telemetry.span import Trace
from elastic3d.worker.journal import Journal
from elastic3d.worker.keeper.injected import NodeProcesses
from elastic3d.worker.keeper.node_metrics import LiveNode, NodeMetrics
from elastic3d.worker.keeper.node_telemetry import NodeTelemetry
from elastic3d.worker.keeper.observers import NodeObservers, observers_of
from elastic3d.worker.options import RunOptions
from tests.metrics.scraping import scrape
from tests.telemetry.histories import LOSS, sealed
from tests.telemetry.receiver import Receiver, plain

SETTINGS = Settings(endpoints="", run_id="run", mode="resident", node="a", address="127.0.0.1", policy=Policy())
LIVE = LiveNode(
    pulse=lambda: None,
    processes=lambda: NodeProcesses(agent="", keepers=(), trainers={}),
    awaited=lambda: 2,
    answers=lambda: Answers(count=3, seconds=0.25, failed=1),
    goodput=dict,
)


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "5")
    with Receiver() as one:
        yield one


def node(url: str, folder: Path, **more: Any) -> tuple[NodeObservers, Journal]:
    """Return a node that sends there, with a port for metrics too, and its journal."""
    address = CollectorAddress(url=url, **more)
    observers = observers_of(SETTINGS, RunOptions(metrics=metrics_address(":0"), telemetry=address))
    assert observers is not None
    return observers, Journal(str(folder), "run", "a", observe=observers.observe)


def play(observers: NodeObservers, journal: Journal) -> None:
    """Write a history's events; steps are taken without their records."""
    telemetry = observers._telemetry
    assert telemetry is not None
    for _, event, fields in LOSS["a"]:
        if isinstance(fields, int):
            telemetry.stepped(fields)
        else:
            journal.emit(event, **fields)


def test_what_a_node_wrote_before_it_could_send_is_sent(receiver: Receiver, tmp_path: Path) -> None:
    """And its last generation ends with it; the same values are served."""
    observers, journal = node(receiver.url, tmp_path, interval=0.1)
    play(observers, journal)
    emitted: list[tuple[str, dict[str, Any]]] = []
    observers.begin(LIVE, lambda name, **fields: emitted.append((name, fields)))
    receiver.until(lambda: "elastic3d.peers_lost" in receiver.latest)
    assert receiver.latest["elastic3d.nodes_awaited"].gauge.data_points[0].as_double == 2
    assert receiver.latest["elastic3d.peers_lost"].sum.data_points[0].as_double == 1
    served = scrape(dict(emitted)["metrics.served"]["address"])
    assert served.value("elastic3d_peers_lost_total") == 1
    assert served.value("elastic3d_telemetry_failures_total", signal="traces") == 0
    observers.look()
    observers.finish()
    observers.close()
    journal.close()
    names = [span.name for span in receiver.spans]
    assert names.count("recovery") == 1
    assert names.count("generation") == 2
    recovery = next(span for span in receiver.spans if span.name == "recovery")
    assert recovery.trace_id == Trace(run="run", generation=2).id
    assert recovery.start_time_unix_nano > 1e18
    assert [name for name, _ in emitted] == ["metrics.served", "telemetry.started"]
    assert receiver.resources[0]["elastic3d.node"] == "a"
    assert {plain(span.attributes)["elastic3d.generation"] for span in receiver.spans} == {1, 2}


def test_telemetry_alone_serves_nothing(receiver: Receiver, tmp_path: Path) -> None:
    """And a run that asks for neither has no observers."""
    assert observers_of(SETTINGS, RunOptions()) is None
    observers = observers_of(SETTINGS, RunOptions(telemetry=CollectorAddress(url=receiver.url)))
    assert observers is not None
    emitted: list[str] = []
    observers.begin(LIVE, lambda name, **fields: emitted.append(name))
    observers.close()
    assert emitted == ["telemetry.started"]
    assert "elastic3d.info" in receiver.latest


def test_events_that_make_no_sense_are_counted_and_no_more(receiver: Receiver, tmp_path: Path) -> None:
    """Each costs the spans that it would have been."""
    observers, journal = node(receiver.url, tmp_path)
    observers.begin(LIVE, lambda name, **fields: None)
    assert observers._telemetry is not None
    for event, fields in (
        ("generation.sealed", {"number": "nonsense", "nodes": ["a"]}),
        ("state.restored", {"rank": 0, "parts": [["x"]], "generation": 1}),
        ("checkpoint.written", {"made_in": None}),
        ("rank.suspected", {"rank": 0, "seconds": object()}),
    ):
        observers._telemetry.observe(event, fields)
    assert observers._metrics._failures == 4
    journal.emit("generation.sealed", **sealed(1, "a"))
    observers.close()
    journal.close()
    assert [span.name for span in receiver.spans if span.name == "generation"] == ["generation"]


def test_a_collector_that_is_not_there_ends_nothing(
    refusing_port: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is told once, and again when the node ends, which takes no longer than it should."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "5")
    metrics = NodeMetrics(SETTINGS, None)
    address = CollectorAddress(url=f"http://127.0.0.1:{refusing_port()}")
    telemetry = NodeTelemetry(SETTINGS, address, failed=metrics.failed)
    emitted: list[str] = []
    observers = NodeObservers(metrics, telemetry)
    journal = Journal(None, "run", "a", observe=observers.observe)
    observers.begin(LIVE, lambda name, **fields: emitted.append(name))
    play(observers, journal)
    begun = time.monotonic()
    observers.close()
    assert time.monotonic() - begun < 10
    assert emitted[0] == "telemetry.started"
    assert emitted[-1] == "telemetry.unsent"
    counts = telemetry.counts
    assert counts is not None
    assert counts.lost > 10

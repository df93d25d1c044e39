"""A node's metrics: what is read when they are scraped, and that nothing about them disturbs the keeper."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic3d.errors import ConfigurationError
from elastic3d.etcd.session import Answers
from elastic3d.membership.policy import Policy
from elastic3d.membership.records import HealthFigures, Pulse, SlowFigures
from elastic3d.metrics.address import metrics_address
from elastic3d.rendezvous.settings import Settings
from elastic3d.worker.journal import Journal
from elastic3d.worker.keeper.injected import NodeProcesses
from elastic3d.worker.keeper.node_metrics import LiveNode, NodeMetrics
from tests.metrics.scraping import Scrape, scrape

SETTINGS = Settings(endpoints="", run_id="run", mode="resident", node="a", address="127.0.0.1", policy=Policy())
SLOW = SlowFigures(node="a", rho=1.4, kind="compute", since=3, cost=0.1, detail="", ranks=(0,))
PULSE = Pulse(
    state="active",
    generation=2,
    every=5.0,
    step=9,
    snapshot_step=8,
    snapshot_age=1.5,
    snapshot_every=2,
    checkpoint_step=5,
    checkpoint_age=12.0,
    watch=HealthFigures(idle=3.0, busy=30.0, slow_from=1.2, slow=(SLOW,)),
)


class Keeper:
    """What a keeper shows, and its journal."""

    def __init__(self, folder: Path) -> None:
        address = metrics_address(":0")
        assert address is not None
        self.pulse: Pulse | None = PULSE
        self.awaited = 0
        self.metrics = NodeMetrics(SETTINGS, address)
        self.journal = Journal(str(folder), "run", "a", observe=self.metrics.observe)
        self.emitted: list[tuple[str, dict[str, Any]]] = []

    def serve(self) -> None:
        live = LiveNode(
            goodput=lambda: {"useful": 41.5},
            pulse=lambda: self.pulse,
            processes=lambda: NodeProcesses(agent="", keepers=(os.getpid(),), trainers={0: 2**22 + 1}),
            awaited=lambda: self.awaited,
            answers=lambda: Answers(count=3, seconds=0.25, failed=1),
        )
        self.metrics.serve(live, self._emit)

    def _emit(self, name: str, **fields: Any) -> None:
        self.emitted.append((name, fields))
        self.journal.emit(name, **fields)

    def scrape(self) -> Scrape:
        return scrape(self.emitted[0][1]["address"])

    def close(self) -> None:
        self.metrics.close()
        self.journal.close()


@pytest.fixture
def keeper(tmp_path: Path) -> Iterator[Keeper]:
    one = Keeper(tmp_path)
    one.serve()
    yield one
    one.close()


def test_what_is_read_at_a_scrape_stands_beside_what_was_counted(keeper: Keeper) -> None:
    """Each series once."""
    keeper.journal.emit("peer.lost", peer="b", evidence="?")
    seen = keeper.scrape()
    assert keeper.emitted[0][0] == "metrics.served"
    assert seen.value("elastic3d_peers_lost_total", run="run", node="a") == 1
    assert seen.value("elastic3d_node_state", state="active") == 1
    assert seen.value("elastic3d_snapshot_age_seconds") == 1.5
    assert seen.value("elastic3d_goodput_seconds_total", category="useful") == 41.5
    assert seen.value("elastic3d_goodput_seconds_total", category="spare") == 0
    assert seen.value("elastic3d_checkpoint_age_seconds", ref="latest") == 12
    assert seen.value("elastic3d_checkpoint_step", ref="verified") is None
    assert seen.value("elastic3d_node_slowness_ratio") == 1.4
    assert seen.value("elastic3d_etcd_answer_seconds_sum") == 0.25
    assert seen.value("elastic3d_etcd_failed_tries_total") == 1
    assert seen.value("elastic3d_processes", process="keeper") == 1
    assert seen.value("elastic3d_processes", process="trainer") == 0
    resident = seen.value("elastic3d_memory_bytes", process="keeper", kind="anonymous")
    assert resident is not None
    assert 1e6 < resident < 1e11
    assert seen.value("elastic3d_metrics_failures_total") == 0


def test_a_node_that_has_not_joined_or_does_not_train_shows_what_it_has(keeper: Keeper) -> None:
    """A spare's snapshots are nobody's."""
    keeper.pulse, keeper.awaited = None, 2
    assert keeper.scrape().value("elastic3d_nodes_awaited") == 2
    assert keeper.scrape().all("elastic3d_node_state") == []


def test_a_part_that_cannot_be_read_costs_only_itself(keeper: Keeper, capfd: pytest.CaptureFixture[str]) -> None:
    """It is counted each time and told once, and the journal goes on."""
    keeper.pulse = object()  # type: ignore[assignment]
    seen = keeper.scrape()
    assert seen.value("elastic3d_metrics_failures_total") == 1
    assert seen.all("elastic3d_node_state") == []
    assert seen.value("elastic3d_etcd_answer_seconds_count") == 3
    keeper.metrics.observe("step.committed", {"step": "nonsense"})
    keeper.metrics.observe("generation.sealed", {"nodes": 7})
    keeper.metrics.observe("etcd.back", {"seconds": object()})
    keeper.metrics.stepped(None, None)  # type: ignore[arg-type]
    keeper.journal.emit("etcd.lost", error="?")
    assert keeper.metrics._failures == 5
    assert keeper.journal.flush(30)
    assert capfd.readouterr().err.count("metrics.failed") <= 1


def test_a_second_node_on_the_same_port_is_refused_at_its_start(keeper: Keeper, tmp_path: Path) -> None:
    """Nothing of it is left."""
    other = Keeper(tmp_path / "other")
    address = metrics_address(keeper.emitted[0][1]["address"])
    assert address is not None
    other.metrics = NodeMetrics(SETTINGS, address)
    with pytest.raises(ConfigurationError, match="share a machine"):
        other.serve()
    other.close()


def test_events_are_counted_though_no_file_takes_them() -> None:
    """`metrics=` needs no `events=`."""
    address = metrics_address(":0")
    assert address is not None
    metrics = NodeMetrics(SETTINGS, address)
    journal = Journal(None, "run", "a", observe=metrics.observe)
    journal.emit("etcd.lost", error="?")
    values = {(one.name, one.labels): one.value for one in metrics._values()}
    assert values["elastic3d_etcd_up", ()] == 0
    journal.close()

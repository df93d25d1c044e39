"""A real job, scraped as Prometheus would while it lives."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from chaos.machine.cluster import Cluster, Launch
from chaos.playing.setting import TRAIN_GPT
from chaos.servers.etcd import EtcdServer
from elastic3d.metrics.server import FRESH
from elastic3d.metrics.table import METRICS
from tests.metrics import promtool
from tests.metrics.scraping import Scrape, scrape

pytestmark = [pytest.mark.etcd, pytest.mark.gloo, pytest.mark.timeout(240), pytest.mark.long]

STEPS, BATCH = 60, 6
SIZES = ("--width=32", "--blocks=3", "--context=32", f"--global-batch={BATCH}", "--micro-batch=2")


def until(holds: Callable[[], bool], cluster: Cluster, patience: float = 90.0) -> None:
    """Wait until something holds, while the job runs."""
    end = time.monotonic() + patience
    while not holds():
        logs = "\n".join(cluster.tail(node.name) for node in cluster.nodes)
        assert time.monotonic() < end, logs
        assert cluster.running(), logs
        time.sleep(0.1)


def lines(events: Path, node: str) -> list[dict[str, Any]]:
    """Return a node's events, without a last line that is being written."""
    file = events / f"{node}-0.jsonl"
    return [json.loads(line) for line in file.read_text().split("\n")[:-1]] if file.exists() else []


def trains(node: Scrape) -> bool:
    """Return whether a node has made steps, and kept what they made: each is told in its own time.

    What steps go into is summed up over eight of them, and rides in the votes of the next eight.
    """
    phase = node.value("elastic3d_step_phase_seconds", phase="forward") or 0
    held = node.value("elastic3d_snapshots_held_total") or 0
    written = node.value("elastic3d_checkpoint_written_bytes_total") or 0
    return phase > 0 and held > 5 and written > 0


def test_metrics_go_on_over_a_death_and_agree_with_the_events(job_etcd: EtcdServer, tmp_path: Path) -> None:
    """Each node serves at a port of its own; counters of the survivors go on, and ports end with the job."""
    events, names = tmp_path / "events", [f"node{number}" for number in range(3)]
    launch = Launch(
        run_id="metrics",
        endpoint=job_etcd.endpoint,
        script=TRAIN_GPT,
        script_args=(
            f"--steps={STEPS}",
            *SIZES,
            "--pause=0.15",
            f"--store={tmp_path / 'store'}",
            "--checkpoint-every=5",
            "--metrics=:0",
            f"--events={events}",
        ),
        min_nodes=2,
        max_nodes=3,
        conf={"mode": "resident", "last_call": "20"},
    )

    def address(node: str) -> str | None:
        served = [line["address"] for line in lines(events, node) if line["event"] == "metrics.served"]
        return served[0] if served else None

    def seen(node: str, *, is_open: bool = False) -> Scrape:
        at = address(node)
        assert at is not None
        return scrape(at, is_open=is_open)

    with Cluster(launch, tmp_path / "nodes") as cluster:
        for name in names:
            cluster.start_node(name)
        until(lambda: all(address(name) is not None for name in names), cluster)
        until(lambda: all(trains(seen(name)) for name in names), cluster)
        scrapes = {name: seen(name, is_open=True) for name in names}
        (first,) = [name for name in names if scrapes[name].value("elastic3d_step") is not None]
        for name, before in scrapes.items():
            assert before.value("elastic3d_generation") == 1
            assert before.value("elastic3d_nodes", state="active", run="metrics", node=name) == 3
            assert before.value("elastic3d_node_state", state="active") == 1
            assert before.value("elastic3d_node_healthy") == 1
            assert before.value("elastic3d_etcd_up") == 1
            assert (before.value("elastic3d_etcd_answer_seconds_count") or 0) > 0
            assert before.value("elastic3d_processes", process="trainer") == 1
            assert (before.value("elastic3d_memory_bytes", process="trainer", kind="anonymous") or 0) > 10e6
            assert trains(before)
            assert before.value("elastic3d_checkpoint_failing") == 0
        assert sum(before.value("elastic3d_generations_total", cause="start") or 0 for before in scrapes.values()) == 1
        victim, last = [name for name in names if name != first]
        cluster.kill_node(victim)
        until(lambda: bool(seen(first).value("elastic3d_recovery_duration_seconds_count", kind="loss")), cluster)
        lower = Counter(line["event"] for line in lines(events, first))
        # A document serves all who ask in the next half second, as it was: this one is made after those lines.
        time.sleep(FRESH)
        after = seen(first)
        scraped = time.time()
        other = seen(last)
        promtool.check("check", "metrics", given=after.text)
        codes = cluster.wait(120)
        logs = "\n".join(cluster.tail(name) for name in names)
        assert {code for name, code in codes.items() if name != victim} == {0}, logs

    steps = after.value("elastic3d_steps_total")
    assert steps is not None
    # An event is counted between the time that its line states and its line.
    upper = sum(line["event"] == "step.committed" and line["at"] <= scraped for line in lines(events, first))
    assert lower["step.committed"] <= steps <= upper
    assert after.value("elastic3d_samples_total") == BATCH * steps
    assert after.value("elastic3d_trainer_exits_total", kind="peer_lost") is not None
    assert after.value("elastic3d_generation") == other.value("elastic3d_generation") == 2
    counted = [one.value("elastic3d_generations_total", cause="death") for one in (after, other)]
    assert sorted(counted) == [0, 1]
    assert other.value("elastic3d_step") is None
    assert other.value("elastic3d_steps_total") == 0
    total = after.value("elastic3d_recovery_duration_seconds_sum", kind="loss")
    phases = [
        value for labels, value in after.all("elastic3d_recovery_phase_seconds_total") if labels["kind"] == "loss"
    ]
    assert len(phases) == 4
    assert sum(phases) == pytest.approx(total)
    for one in (after, other):
        assert one.value("elastic3d_metrics_failures_total") == 0
        assert one.value("elastic3d_thread_failures_total") == 0
    named = {metric.removesuffix("_total") for metric in METRICS}
    assert {family.name for family in after.families} <= named
    # Without: a target, the peak of a CPU, audits, rollbacks' gauges; what a job of this kind does not have.
    missing = named - {family.name for family in after.families}
    assert missing <= {
        "elastic3d_target_step",
        "elastic3d_node_peak_flops_per_second",
        "elastic3d_audited_step",
        "elastic3d_store_over_limit_bytes",
        "elastic3d_checkpoint_step",
        "elastic3d_checkpoint_age_seconds",
        "elastic3d_slow_nodes",
        "elastic3d_node_slowness_ratio",
        "elastic3d_noise_scale",
    }, missing
    for name in (first, last):
        with pytest.raises(OSError, match="refused"):
            seen(name)

"""What events make of the metrics."""

from __future__ import annotations

import math
import threading
import time
from typing import Any

import pytest

from elastic3d.health.sheet import StepSheet
from elastic3d.log import EVENTS
from elastic3d.metrics.exposition import Exposition
from elastic3d.metrics.metric import OTHER
from elastic3d.metrics.recording import Distribution, MetricRecorder
from tests.metrics import promtool
from tests.metrics.scraping import parsed


class Node:
    """A node's recorder, and its events with a time that passes."""

    def __init__(self, name: str = "a") -> None:
        self.recorder, self.name, self.now = MetricRecorder(name), name, 100.0

    def emit(self, event: str, *, after: float = 0.0, **fields: Any) -> None:
        self.now += after
        self.recorder.observe(event, {"run": "r", "node": self.name, "slot": 0, **fields}, self.now)

    def sealed(self, number: int, *nodes: str, cause: str = "death", leader: str = "a", after: float = 0.0) -> None:
        layout = {"pp": 1, "dp": len(nodes), "tp": 1, "zero": 3}
        known: dict[str, Any] = {"number": number, "cause": cause, "nodes": list(nodes), "spares": ["z"]}
        self.emit("generation.sealed", after=after, **known, layout=layout, leader=leader)

    def step(self, step: int, *, after: float = 1.0, clean: int = -1, **fields: Any) -> None:
        known: dict[str, Any] = {
            "step": step,
            "loss": (2.5).hex(),
            "gradient_norm": None,
            "seconds": 0.3,
            "safe_step": step - 1,
            "samples": [8 * step, 8 * step + 8],
            "sample_sum": 5,
            "processor": 0.25,
            "rank": 0,
            "generation": 1,
        }
        self.emit("step.committed", after=after, **known | fields)
        self.recorder.stepped(step, self.now, clean=clean, first=True)

    def value(self, name: str, *labels: str) -> Any:
        values = {(one.name, one.labels): one.value for one in self.recorder.values()}
        return values.get((name, labels))


def test_a_step_is_counted_with_its_samples() -> None:
    """Those that were left out are counted apart."""
    node = Node()
    node.step(1)
    node.step(2, excluded=[[17, 19], [20, 21]], loss="nan", safe_step=-1, read=1_000)
    assert node.value("elastic3d_steps_total") == 2
    assert node.value("elastic3d_data_read_bytes_total") == 1_000
    assert node.value("elastic3d_samples_total") == 13
    assert node.value("elastic3d_samples_excluded_total") == 3
    assert math.isnan(node.value("elastic3d_loss"))
    assert node.value("elastic3d_gradient_norm") is None
    assert node.value("elastic3d_safe_step") is None
    assert node.value("elastic3d_step_duration_seconds") == Distribution(counts=(0,) * 5 + (2,) * 10, sum=0.6)


def test_tokens_and_operations_are_counted_where_they_are_known() -> None:
    """Those of samples that were left out are not; without the model's figures both stay at 0."""
    node = Node()
    node.step(1)
    assert node.value("elastic3d_tokens_total") == node.value("elastic3d_model_flops_total") == 0
    node.emit("model.measured", parameters=9, sample_flops=6e9, peak_flops=None, detail="no data sheet")
    node.step(2, tokens=8 * 64)
    node.step(3, tokens=6 * 64, excluded=[[25, 27]])
    assert node.value("elastic3d_tokens_total") == 14 * 64
    assert node.value("elastic3d_model_flops_total") == 14 * 6e9
    node.emit("model.measured", parameters=9, sample_flops=None, peak_flops=None, detail="it does not run on meta")
    node.step(4)
    assert node.value("elastic3d_model_flops_total") == 14 * 6e9


def test_gradients_between_nodes_are_those_of_the_layout() -> None:
    """Turn by turn, those of samples that were left out as well; until the node of rank 0 says something else."""
    node = Node()
    node.emit("reduction.planned", turn_bytes=100.0, turn_samples=6, step_bytes=7.0, detail=None)
    node.step(1)
    node.step(2, excluded=[[16, 24]])
    assert node.value("elastic3d_gradient_sent_bytes_total") == 2 * (2 * 100 + 7)
    node.emit("reduction.planned", turn_bytes=0.0, turn_samples=0, step_bytes=0.0, detail="fast")
    node.step(3)
    assert node.value("elastic3d_gradient_sent_bytes_total") == 414
    node.emit("snapshot.held", step=3, sent=1000)
    node.emit("snapshot.held", step=4, sent=0)
    assert node.value("elastic3d_snapshot_sent_bytes_total") == 1000


def test_a_peak_is_there_while_a_node_trains() -> None:
    """Of a spare nothing could be used, and of a device without a sheet nothing is known."""
    peak = "elastic3d_node_peak_flops_per_second"
    node = Node("b")
    node.emit("model.measured", sample_flops=1.0, peak_flops=8 * 989.5e12)
    assert node.value(peak) is None
    node.sealed(1, "a", "b")
    assert node.value(peak) == 7.916e15
    node.sealed(2, "a")
    assert node.value(peak) is None
    unknown = Node("a")
    unknown.emit("model.measured", sample_flops=1.0, peak_flops=None)
    unknown.sealed(1, "a")
    assert unknown.value(peak) is None


def test_steps_that_were_seen_before_are_repeated() -> None:
    """Also by a node that had not rank 0 when they were made first."""
    node = Node()
    for step in (1, 2, 3):
        node.recorder.stepped(step, float(step))
    node.step(3)
    node.step(4)
    node.step(4)
    assert node.value("elastic3d_steps_repeated_total") == 2


def test_what_rank_0_shows_goes_with_it() -> None:
    """Its gauges are gone when another node has it; counters stay."""
    node = Node()
    node.sealed(1, "a", "b", cause="start")
    node.step(1)
    assert node.value("elastic3d_loss") == 2.5
    node.sealed(2, "b", "a")
    assert node.value("elastic3d_loss") is node.value("elastic3d_step") is None
    assert node.value("elastic3d_steps_total") == 1
    assert node.value("elastic3d_nodes", "active") == 2
    assert node.value("elastic3d_layout_size", "dp") == 2


def test_a_generation_is_counted_by_the_node_that_leads() -> None:
    """So the sum over nodes is the number of generations."""
    nodes = [Node("a"), Node("b")]
    for node in nodes:
        node.sealed(1, "a", "b", cause="start", leader="a")
        node.sealed(2, "b", leader="b")
    causes = [[node.value("elastic3d_generations_total", cause) for node in nodes] for cause in ("start", "death")]
    assert causes == [[1, 0], [0, 1]]


def test_a_recovery_is_divided_into_phases() -> None:
    """A second death during the first one's recovery lengthens it; a planned change is told apart."""
    node = Node()
    node.sealed(1, "a", "b", "c", cause="start")
    node.emit("state.restored", rank=0, source="none", step=0)
    node.step(1)
    node.emit("peer.lost", after=2.0, peer="b")
    node.sealed(2, "a", "c", after=0.5)
    node.emit("peer.lost", after=1.0, peer="c")
    node.sealed(3, "a", after=1.5)
    node.emit("state.restored", after=3.0, rank=1, source="memory", step=1)
    node.emit("state.restored", after=1.0, rank=0, source="memory", step=1)
    node.step(2, after=0.25)
    seconds = [
        node.value("elastic3d_recovery_phase_seconds_total", "loss", phase)
        for phase in ("notice", "seal", "restore", "first_step")
    ]
    assert seconds == [2.0, 3.0, 4.0, 0.25]
    assert node.value("elastic3d_recovery_duration_seconds", "loss").sum == 9.25
    node.emit("generation.proposed", after=1.0, number=4)
    node.step(3, after=1.0)
    node.sealed(4, "a", "d", cause="join", after=0.5)
    node.emit("state.restored", after=1.0, rank=0, source="memory", step=3)
    node.step(4, after=0.5)
    assert node.value("elastic3d_recovery_duration_seconds", "planned").sum == 2.0
    assert node.value("elastic3d_recovery_duration_seconds", "loss").counts[-1] == 1
    assert node.value("elastic3d_restores_total", "memory") == 2


@pytest.mark.parametrize("late", [False, True])
def test_the_time_in_which_a_node_stands_aside_is_no_recovery(late: bool) -> None:
    """Others made steps for five hours, which it did not hear of; its own last one may be heard after the seal."""
    node = Node()
    node.sealed(1, "a", "b", cause="start")
    node.emit("state.restored", rank=0, source="none", step=0)
    node.step(1)
    node.sealed(2, "b", "c", cause="link")
    if late:
        node.step(2)
    node.emit("peer.lost", after=9_000.0, peer="d")
    node.sealed(3, "a", after=9_000.0)
    node.emit("state.restored", rank=0, source="memory", step=9000)
    node.step(9001)
    assert node.value("elastic3d_recovery_duration_seconds", "loss").counts[-1] == 0
    assert node.value("elastic3d_recovery_phase_seconds_total", "loss", "notice") == 0
    node.sealed(4, "a", "d", after=1.0)
    node.emit("state.restored", after=1.0, rank=0, source="memory", step=9001)
    node.step(9002, after=0.5)
    assert node.value("elastic3d_recovery_duration_seconds", "loss").sum == 2.5


def test_an_event_that_several_ranks_tell_counts_once() -> None:
    """A conviction is told by rank 0 and on the node it is about."""
    node = Node()
    for rank in (0, 3):
        node.emit("node.lying", rank=rank, nodes=["b"])
        node.emit("audit.failed", rank=rank, finding="persistent")
    node.emit("state.altered", rank=3)
    node.emit("rank.stuck")
    kinds = ("lying", "altered", "stuck", "slow")
    assert [node.value("elastic3d_verdicts_total", kind) for kind in kinds] == [1, 1, 1, 0]
    assert node.value("elastic3d_audits_total", "persistent") == 1


def test_an_audit_in_which_all_agreed_shows_in_the_step_that_is_vouched_for() -> None:
    """What a generation begins with was vouched for before."""
    node = Node()
    node.sealed(1, "a", "b", cause="start")
    for step, clean in ((10, 8), (11, 8), (12, 11), (13, 12)):
        node.step(step, clean=clean)
    node.sealed(2, "a", "b")
    node.step(14, clean=13)
    assert node.value("elastic3d_audits_total", "clean") == 2
    assert node.value("elastic3d_audited_step") == 13


def test_states_that_begin_and_end_are_gauges() -> None:
    """Each is there from the beginning: an alert needs a series that says that all is well."""
    node = Node()
    gauges = (
        "elastic3d_etcd_up",
        "elastic3d_etcd_writable",
        "elastic3d_snapshot_stale",
        "elastic3d_checkpoint_failing",
        "elastic3d_peers_unreachable",
    )
    assert [node.value(name) for name in gauges] == [1, 1, 0, 0, 0]
    for event in ("etcd.lost", "etcd.impaired", "snapshot.stale", "checkpoint.failed"):
        node.emit(event, error="?")
    for peer in ("b", "c", "b"):
        node.emit("peer.unreachable", peer=peer)
    assert [node.value(name) for name in gauges] == [0, 0, 1, 1, 2]
    node.emit("etcd.back", seconds=2.5)
    for event in ("etcd.mended", "snapshot.fresh", "checkpoint.mended"):
        node.emit(event)
    node.emit("peer.reachable", peer="b")
    assert [node.value(name) for name in gauges] == [1, 1, 0, 0, 1]
    assert node.value("elastic3d_etcd_outage_seconds_total") == 2.5


def test_the_parts_of_a_step_are_those_of_the_newest_row() -> None:
    """A node that does not train any more shows none."""
    node = Node()
    node.sealed(1, "b", "a", cause="start")
    row = StepSheet(work=1.0, rounds=4.0, forward=0.2, backward=0.4, wait_dp=0.1, read=3e6).row
    node.recorder.stepped(8, 1.0, row=row)
    node.recorder.stepped(9, 2.0)
    node.recorder.stepped(10, 3.0, row=(0.0,) * 14)
    parts = [node.value("elastic3d_step_phase_seconds", phase) for phase in ("forward", "backward", "wait_dp", "data")]
    assert parts == [0.2, 0.4, 0.1, 0.0]
    assert node.value("elastic3d_step_read_bytes") == 3e6
    node.sealed(2, "b")
    assert node.value("elastic3d_step_phase_seconds", "forward") is None
    assert node.value("elastic3d_step_read_bytes") is None


def test_unforeseen_values_of_labels_make_no_series() -> None:
    """However many there are."""
    node = Node()
    before = len(node.recorder.values())
    for number in range(1000):
        node.emit("trainer.exited", kind=f"kind {number}")
        node.emit("generation.sealed", number=number, cause=f"cause {number}", nodes=["a"], spares=[], leader="a")
    assert node.value("elastic3d_trainer_exits_total", OTHER) == 1000
    assert len(node.recorder.values()) <= before + 3


def test_amounts_that_are_no_numbers_or_negative_leave_counters_as_they_are() -> None:
    """A counter never shrinks."""
    node = Node()
    for seconds in (math.nan, math.inf, -5.0, None):
        node.emit("etcd.back", seconds=seconds)
        node.emit("checkpoint.verified", seconds=seconds)
    assert node.value("elastic3d_etcd_outage_seconds_total") == 0
    assert node.value("elastic3d_checkpoint_verify_seconds").sum == 0


@pytest.mark.parametrize("is_open", [False, True], ids=["text", "OpenMetrics"])
def test_the_document_is_read_back_by_prometheus_own_parser(is_open: bool) -> None:
    """Whatever the run is called."""
    node = Node()
    node.sealed(1, "a", "b", cause="start")
    node.step(1)
    run = 'a "run"\\ of\nlines é'
    document, _ = Exposition(run, "a", node.recorder.values).document("application/openmetrics-text" if is_open else "")
    read = parsed(document.decode(), is_open=is_open)
    assert read.value("elastic3d_loss", run=run, node="a") == 2.5
    assert read.value("elastic3d_steps_total", run=run, node="a") == 1
    assert read.value("elastic3d_step_duration_seconds_bucket", le="0.5") == 1
    assert {labels["run"] for family in read.families for labels in (one.labels for one in family.samples)} == {run}
    if not is_open:
        promtool.check("check", "metrics", given=document.decode())


def test_events_may_come_from_many_threads_while_the_metrics_are_read() -> None:
    """None is lost."""
    node = Node()

    def emit() -> None:
        for _ in range(500):
            node.recorder.observe("peer.lost", {"peer": "b"}, 1.0)

    threads = [threading.Thread(target=emit) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        node.recorder.values()
    assert node.value("elastic3d_peers_lost_total") == 2000


def test_every_event_may_lack_every_field_that_metrics_do_not_need() -> None:
    """Fields that are None were not known."""
    node = Node()
    for name in EVENTS:
        if name != "step.committed":
            node.emit(name)


def test_a_step_costs_far_less_than_a_millisecond() -> None:
    """0.2 % of a step of half a second would be 1 ms."""
    node = Node()
    row = StepSheet(work=1.0, rounds=4.0, forward=0.2, backward=0.4).row
    best = math.inf
    for _ in range(5):
        began = time.thread_time()
        for step in range(100):
            node.step(step)
            node.recorder.stepped(step, node.now, row=row)
            node.emit("snapshot.held", step=step)
        best = min(best, (time.thread_time() - began) / 100)
    assert best < 0.001, best

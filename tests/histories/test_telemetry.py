"""A real job that sends its telemetry: one trace of a recovery, with the parts of the nodes that are left."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from chaos.machine.cluster import Cluster, Launch
from chaos.playing.setting import TRAIN_GPT
from chaos.servers.etcd import EtcdServer
from elastic3d.telemetry.span import Trace
from tests.telemetry.receiver import Receiver, plain

pytestmark = [pytest.mark.etcd, pytest.mark.gloo, pytest.mark.timeout(240), pytest.mark.long]

RUN, STEPS, BATCH, CONTEXT = "telemetry", 60, 6, 32
SIZES = ("--width=32", "--blocks=3", f"--context={CONTEXT}", f"--global-batch={BATCH}", "--micro-batch=2")


def until(holds: Callable[[], bool], cluster: Cluster, patience: float = 90.0) -> None:
    """Wait until something holds, while the job runs."""
    end = time.monotonic() + patience
    while not holds():
        logs = "\n".join(cluster.tail(node.name) for node in cluster.nodes)
        assert time.monotonic() < end, logs
        assert cluster.running(), logs
        time.sleep(0.1)


def of_generation(receiver: Receiver, generation: int) -> list[Span]:
    """Return the spans of one trace."""
    id = Trace(run=RUN, generation=generation).id
    return [span for span in receiver.spans if span.trace_id == id]


def test_a_recovery_is_one_trace_of_all_nodes_that_are_left(job_etcd: EtcdServer, tmp_path: Path) -> None:
    """A node is killed: the others' spans join under one recovery, whose phases add up; each parent was sent once."""
    names = [f"node{number}" for number in range(3)]
    with Receiver() as receiver:
        launch = Launch(
            run_id=RUN,
            endpoint=job_etcd.endpoint,
            script=TRAIN_GPT,
            script_args=(
                f"--steps={STEPS}",
                *SIZES,
                "--pause=0.15",
                f"--store={tmp_path / 'store'}",
                "--checkpoint-every=5",
                f"--telemetry={receiver.url}",
                f"--events={tmp_path / 'events'}",
            ),
            min_nodes=2,
            max_nodes=3,
            conf={"mode": "resident", "last_call": "20"},
            environment={"OTEL_METRIC_EXPORT_INTERVAL": "500"},
        )

        def there(generation: int, name: str) -> int:
            return sum(span.name == name for span in of_generation(receiver, generation))

        with Cluster(launch, tmp_path / "nodes") as cluster:
            for name in names:
                cluster.start_node(name)
            until(lambda: there(1, "checkpoint") > 1 and there(1, "beginning") == 1, cluster)
            (begun,) = [span for span in of_generation(receiver, 1) if span.name == "beginning"]
            first = receiver.sender[begun.span_id]
            victim = [name for name in names if name != first][-1]
            cluster.kill_node(victim)
            until(lambda: there(2, "recovery") == 1, cluster)
            codes = cluster.wait(120)
            logs = "\n".join(cluster.tail(name) for name in names)
            assert {code for name, code in codes.items() if name != victim} == {0}, logs

    # Whatever was sent, was sent once, and all of it joins: what the node that died had not sent was no parent.
    assert max(Counter(span.span_id for span in receiver.spans).values()) == 1
    second = of_generation(receiver, 2)
    ids = {span.span_id: span for span in second}
    for span in second:
        assert not span.parent_span_id or span.parent_span_id in ids, (span.name, sorted(one.name for one in second))
    (root,) = [span for span in second if not span.parent_span_id]
    assert root.name == "generation"
    about = plain(root.attributes)
    assert (about["elastic3d.cause"], about["elastic3d.generation"], len(about["elastic3d.nodes"])) == ("death", 2, 2)
    (recovery,) = [span for span in second if span.name == "recovery"]
    assert recovery.parent_span_id == root.span_id
    ready = [span for span in second if span.name == "trainer.begin"]
    assert {plain(span.attributes)["elastic3d.rank"] for span in ready} == {0, 1}
    assert {span.parent_span_id for span in ready} == {recovery.span_id}
    assert {receiver.sender[span.span_id] for span in ready} == set(names) - {victim}
    phases = [span for span in second if span.name.startswith("recovery.")]
    assert [span.name for span in sorted(phases, key=lambda span: span.start_time_unix_nano)] == [
        "recovery.notice",
        "recovery.seal",
        "recovery.restore",
        "recovery.first_step",
    ]
    took = recovery.end_time_unix_nano - recovery.start_time_unix_nano
    assert sum(span.end_time_unix_nano - span.start_time_unix_nano for span in phases) == pytest.approx(took, abs=1e6)
    assert 0 < took < 60e9
    saved = [span for span in second if span.name == "checkpoint"]
    assert saved
    written = Counter(ids[span.parent_span_id].span_id for span in second if span.name == "checkpoint.write")
    assert all(written[span.span_id] == 2 for span in saved)
    assert {resource["elastic3d.node"] for resource in receiver.resources} == set(names)

    def last(node: str, metric: str) -> float:
        return sum(float(point.as_double) for point in receiver.by_node[node][metric].sum.data_points)

    # The last values are those of the end: what rank 0's node counted is what the run took.
    assert last(first, "elastic3d.steps") - last(first, "elastic3d.steps_repeated") == STEPS
    assert last(first, "elastic3d.tokens") == CONTEXT * last(first, "elastic3d.samples")
    assert last(first, "elastic3d.model_flops") > 1e6 * last(first, "elastic3d.samples")
    assert last(first, "elastic3d.gradient_sent") > 0
    assert "elastic3d.node_peak_flops_per_second" not in receiver.by_node[first]
    for node in set(names) - {victim}:
        assert last(node, "elastic3d.snapshot_sent") > 0
        assert last(node, "elastic3d.telemetry_spans_lost") == 0
        assert last(node, "elastic3d.metrics_failures") == 0

"""What nodes waited for because another one's samples came late, in the files' account and in the one in etcd."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from chaos.machine.cluster import Cluster, Launch
from chaos.servers.etcd import EtcdServer
from elastic3d import etcd_keys as keys
from elastic3d.accounting.goodput import goodput
from elastic3d.accounting.live_record import GoodputRecord
from elastic3d.accounting.node_spans import node_spans
from elastic3d.accounting.recorded_events import SECOND
from elastic3d.accounting.spans import Category
from elastic3d.cli.events_folder import read_run
from elastic3d.etcd import EtcdClient
from elastic3d.membership.records import decode

pytestmark = [pytest.mark.etcd, pytest.mark.gloo, pytest.mark.long, pytest.mark.timeout(300)]

SCRIPT = Path(__file__).parent / "scripts" / "late_loader.py"
STEPS = 40


def test_a_wait_for_the_samples_of_another_rank_is_a_wait_for_data_on_every_node(
    job_etcd: EtcdServer, tmp_path: Path
) -> None:
    """Though rank 0, whose waits alone are written down with each step, hardly waits for its own."""
    launch = Launch(
        run_id="late-loader",
        endpoint=job_etcd.endpoint,
        script=SCRIPT,
        script_args=(str(STEPS),),
        min_nodes=2,
        max_nodes=2,
        conf={"mode": "resident"},
        environment={"EVENTS": str(tmp_path / "events")},
    )
    with Cluster(launch, tmp_path / "nodes") as cluster:
        for number in range(2):
            cluster.start_node(f"node{number}")
        codes = cluster.wait(200)
        logs = "\n".join(cluster.tail(f"node{number}") for number in range(2))
    assert set(codes.values()) == {0}, logs
    read = read_run(tmp_path / "events")
    (generation,) = read.run.generations
    told = [step for step in generation.steps if step.waits is not None]
    # The first row has the first steps, which compile; the last votes came to no end.
    assert len(told) >= STEPS - 3 * 8
    own = sum(step.data for step in told) / SECOND
    waited = len(told) * 8 * 0.08
    assert own < waited / 4
    files = goodput(read.run_id, read.run, node_spans(read.run), read.clocks)
    for node in files.nodes:
        assert node.by_category[Category.DATA] / SECOND == pytest.approx(waited, rel=0.25), node.node
        assert sum(node.by_category.values()) == node.microseconds
    key = f"/elastic3d/{read.run_id}/{keys.GOODPUT}"
    with EtcdClient(job_etcd.endpoint) as client:
        item = client.get(key)
    assert item is not None
    record = decode(GoodputRecord, item.value, key)
    both = files.by_category[Category.DATA] / SECOND
    assert record.by_category["data"] / SECOND == pytest.approx(both, rel=0.1)
    assert [one.last - one.first + 1 for one in record.stretches][-1] <= 8
    assert all(one.last + 1 == other.first for one, other in pairwise(record.stretches))

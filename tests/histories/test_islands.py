"""Islands that are jobs of real processes: one loses a node, one dies, one comes, and one follows from the records."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from chaos.machine.cluster import Cluster, Launch
from chaos.machine.processes import wait_until
from chaos.servers.etcd import EtcdServer
from checkpointing import open_store
from elastic3d.islands.exchange import Exchange
from elastic3d.islands.record import account
from tests.islands import mains
from tests.islands.plain import replayed
from tests.paths import ROOT

pytestmark = [pytest.mark.etcd, pytest.mark.gloo, pytest.mark.timeout(420), pytest.mark.long]

SCRIPT = Path(__file__).parent / "scripts" / "islands.py"


def launch(
    etcd: EtcdServer, folder: Path, name: str, *, overlap: int, nodes: int = 1, minimum: int = 1, pause: float = 0.1
) -> Launch:
    return Launch(
        run_id=f"{name}-{overlap}",
        endpoint=etcd.endpoint,
        script=SCRIPT,
        script_args=(str(folder), name, str(minimum), str(pause), str(overlap)),
        min_nodes=1,
        max_nodes=nodes,
        conf={"mode": "resident", "last_call": "20" if nodes > 1 else "0.5"},
        environment={"PYTHONPATH": str(ROOT)},
    )


def seen(folder: Path, name: str, event: str, **fields: Any) -> list[Any]:
    """Return an island's events of one kind, with these fields."""
    files = (folder / f"events-{name}").glob("*.jsonl")
    lines = [json.loads(line) for file in files for line in file.read_text().splitlines() if event in line]
    return [one for one in lines if one["event"] == event and fields.items() <= one.items()]


@pytest.mark.parametrize("overlap", [0, pytest.param(mains.EVERY // 2, marks=pytest.mark.slow)])
def test_what_happens_within_and_between_islands_is_in_the_records(
    job_etcd: EtcdServer, tmp_path: Path, overlap: int
) -> None:
    """A node of east is killed, the whole of west, and north comes: east's bits, and north's, are the records'."""

    def until(condition: Callable[[], Any]) -> None:
        assert wait_until(lambda: bool(condition()), 150), "\n".join(
            cluster.tail(node.name) for cluster in clusters for node in cluster.nodes
        )

    exchange = Exchange(open_store(str(tmp_path / "between")))
    clusters: list[Cluster] = []
    with ExitStack() as stack:

        def started(name: str, **options: Any) -> Cluster:
            nodes = options.get("nodes", 1)
            one = stack.enter_context(
                Cluster(launch(job_etcd, tmp_path, name, overlap=overlap, **options), tmp_path / f"nodes-{name}")
            )
            clusters.append(one)
            for number in range(nodes):
                one.start_node(f"node{number}")
            return one

        west = started("west", minimum=2)
        until(exchange.joined)
        east = started("east", nodes=2, pause=0.5)
        until(lambda: seen(tmp_path, "east", "step.committed", step=mains.EVERY + 1))
        east.kill_node("node1")
        until(lambda: exchange.sealed(2))
        west.kill_node("node0")
        started("north", pause=0.0)
        until(lambda: (tmp_path / "east.json").exists() and (tmp_path / "north.json").exists())
        for cluster in clusters:
            cluster.wait(60)
    records = list(exchange.records())
    assert seen(tmp_path, "east", "generation.sealed", cause="death")
    assert "west.1" in [one for record in records for one in record.lost]
    assert "north.1" in [one for record in records for one in record.admitted]
    results = {name: json.loads((tmp_path / f"{name}.json").read_text()) for name in ("east", "north")}
    assert results["east"][2]
    assert results["north"][2], "each island accounts for its own samples"
    bits = replayed(records, overlap=overlap, mixing=0.5 if overlap else 0.0)
    assert bits == {"east.1": tuple(results["east"][:2]), "north.1": tuple(results["north"][:2])}
    assert account(records).whole

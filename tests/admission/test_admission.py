"""A node that fails its own checks never joins, and says why where people look."""

from __future__ import annotations

import json
import socket
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from chaos.machine.cluster import Cluster, Launch, started_by
from chaos.machine.preloaded import PreloadedServer
from chaos.servers.etcd import EtcdServer
from elastic3d.admission.check import CheckResult
from elastic3d.admission.record import KEPT, FailedAdmission
from elastic3d.errors import AdmissionFailed, EtcdUnavailable
from elastic3d.etcd import EtcdClient
from elastic3d.membership.policy import Policy
from elastic3d.membership.records import SCHEMA, MemberRecord, decode, encode
from elastic3d.rendezvous.settings import Settings
from elastic3d.values import Cause, Generation, ModelProfile, Node, StoreAt
from elastic3d.worker.journal import Journal
from elastic3d.worker.keeper.admit import admit
from elastic3d.worker.options import RunOptions

pytestmark = [pytest.mark.etcd, pytest.mark.timeout(180), pytest.mark.long]

SCRIPT = Path(__file__).parent / "scripts" / "unfit.py"
PROFILE = ModelProfile(blocks=2, parameters=100, micro_batches=4, micro_batch=1, digest="d")


@pytest.fixture(autouse=True)
def agents(preloaded: PreloadedServer) -> Iterator[None]:
    """Fork the agents of these tests."""
    with started_by(preloaded):
        yield


@pytest.fixture(scope="module")
def server() -> Iterator[EtcdServer]:
    """One etcd for these tests."""
    with EtcdServer() as etcd:
        yield etcd


def start(server: EtcdServer, workdir: Path, run_id: str, temp: Path, **conf: str) -> tuple[int | None, str, list[Any]]:
    """Run one agent whose keeper has its temporary files in `temp`; return its exit code, output and events."""
    launch = Launch(
        run_id=run_id,
        endpoint=server.endpoint,
        script=SCRIPT,
        script_args=(str(temp), str(workdir / "events")),
        conf={"mode": "resident", "last_call": "1", **conf},
    )
    with Cluster(launch, workdir) as cluster:
        node = cluster.start_node("node0")
        code = cluster.wait(120)["node0"]
        assert not cluster.leftovers()
        lines = (workdir / "events" / "node0-0.jsonl").read_text().splitlines()
        return code, node.log.read_text(), [json.loads(line) for line in lines]


@pytest.mark.gloo
def test_an_unfit_node_is_kept_out_until_it_is_repaired(server: EtcdServer, tmp_path: Path) -> None:
    """It never registers, and names the folder in its log, its events and etcd.

    Once repaired it joins, and the record is gone.
    """
    (tmp_path / "file").touch()
    run_id = f"unfit-{uuid.uuid4().hex[:8]}"
    root = f"/elastic3d/{run_id}/"
    why = f"{tmp_path}/file/under cannot be written (Not a directory)"
    code, said, events = start(server, tmp_path / "first", run_id, tmp_path / "file" / "under")
    assert code == 1
    assert f"node node0 is not fit to take part: disk: {why}" in said
    assert [(event["event"], event.get("check")) for event in events] == [
        ("node.started", None),
        ("model.measured", None),
        ("admission.failed", "disk"),
    ]
    with EtcdClient(server.endpoint) as client:
        ((key, value, lease),) = [(entry.key, entry.value, entry.lease) for entry in client.range(root)[0]]
        assert key == f"{root}refused/node0"
        assert json.loads(value)["schema"] == SCHEMA
        refusal = decode(FailedAdmission, value, key)
        assert (refusal.node, [check.name for check in refusal.checks]) == ("node0", ["disk"])
        assert why in refusal.checks[0].detail
        left = client.time_to_live(lease)
        assert left is not None
        assert KEPT - 600 < left <= KEPT

        (tmp_path / "whole").mkdir()
        code, said, events = start(server, tmp_path / "second", run_id, tmp_path / "whole")
        assert code == 0, said
        assert "member.joined" in {event["event"] for event in events}
        assert client.get(key) is None


@pytest.mark.gloo
def test_admission_checks_can_be_turned_off(server: EtcdServer, tmp_path: Path) -> None:
    """With --rdzv-conf=admission=off the same node trains."""
    run_id = f"unfit-{uuid.uuid4().hex[:8]}"
    code, said, events = start(server, tmp_path / "work", run_id, tmp_path / "missing", admission="off")
    assert code == 0, said
    assert events[-1]["event"] == "job.ended"


def settings(endpoint: str, **changes: Any) -> Settings:
    values: dict[str, Any] = {
        "endpoints": endpoint,
        "run_id": f"admit-{uuid.uuid4().hex[:8]}",
        "mode": "resident",
        "node": "me",
        "address": "127.0.0.1",
        "policy": Policy(minimum=1, maximum=4, lease=2.0),
    }
    return Settings(**(values | changes))


def run(conf: Settings, *computed: CheckResult, options: RunOptions | None = None, folder: Path | None = None) -> None:
    journal = Journal(str(folder) if folder else None, conf.run_id, conf.node)
    try:
        admit(conf, options or RunOptions(), PROFILE, computed, journal)
    finally:
        journal.close()


def train(client: EtcdClient, conf: Settings, ports: dict[str, int], registered: set[str]) -> None:
    """Seal a generation of nodes with these heartbeat ports, of which only some hold their lease."""
    nodes = tuple(
        Node(name=name, incarnation="i", address="127.0.0.1", slots=(), heartbeat_port=port)
        for name, port in ports.items()
    )
    client.put(f"{conf.root}board/generation", encode(Generation(number=1, cause=Cause.START, nodes=nodes)))
    for node in nodes:
        if node.name in registered:
            client.put(f"{conf.root}roll/members/{node.id}", encode(MemberRecord(node=node)))


def test_a_healthy_node_is_admitted(server: EtcdServer, tmp_path: Path) -> None:
    """Nothing is left behind, neither in etcd nor on the disks."""
    conf = settings(server.endpoint)
    (tmp_path / "store").mkdir()
    run(conf, CheckResult(name="product cpu", ok=True), options=RunOptions(store=StoreAt(url=str(tmp_path / "store"))))
    assert list((tmp_path / "store").iterdir()) == []
    with EtcdClient(server.endpoint) as client:
        assert client.range(conf.root)[0] == ()


def test_a_failed_check_of_the_measuring_trainer_keeps_the_node_out(server: EtcdServer, tmp_path: Path) -> None:
    """A device that multiplies wrongly keeps its node out; the other reasons are reported beside it."""
    conf = settings(server.endpoint)
    (tmp_path / "file").touch()
    bad = CheckResult(name="product cuda:3", ok=False, detail="multiplies wrongly")
    with pytest.raises(AdmissionFailed, match=r"product cuda:3: multiplies wrongly; store: .*/file cannot be written"):
        run(conf, bad, options=RunOptions(store=StoreAt(url=f"file://{tmp_path}/file")), folder=tmp_path)
    events = [json.loads(line)["check"] for line in (tmp_path / "me-0.jsonl").read_text().splitlines()]
    assert events == ["product cuda:3", "store"]
    with EtcdClient(server.endpoint) as client:
        client.delete(conf.root, prefix=True)


def test_a_model_too_large_for_every_allowed_layout_is_refused(server: EtcdServer) -> None:
    """Unless no snapshots are taken: then the memory is not needed."""
    conf = settings(server.endpoint)
    journal = Journal(None, conf.run_id, conf.node)
    huge = ModelProfile(blocks=2, parameters=10**15, micro_batches=4, micro_batch=1, digest="d")
    with pytest.raises(AdmissionFailed, match="memory: snapshots of 1,000,000,000,000,000 parameters"):
        admit(conf, RunOptions(), huge, (), journal)
    admit(conf, RunOptions(snapshot_every=0), huge, (), journal)


def test_neighbours_that_refuse_connections_keep_a_node_out(
    server: EtcdServer, refusing_port: Callable[[], int]
) -> None:
    """They hold their leases but do not answer this node: it could train with nobody."""
    conf = settings(server.endpoint)
    with EtcdClient(server.endpoint) as client:
        train(client, conf, {"a": refusing_port(), "b": refusing_port()}, {"a", "b"})
        with pytest.raises(AdmissionFailed, match=r"neighbours: .*Connection refused.*look at this node's network"):
            run(conf)
        assert client.get(f"{conf.root}refused/me") is not None


def test_neighbours_without_leases_are_ignored(server: EtcdServer, refusing_port: Callable[[], int]) -> None:
    """A generation whose nodes have lost their leases is left over from a dead job; the next job must still start."""
    conf = settings(server.endpoint)
    with EtcdClient(server.endpoint) as client:
        train(client, conf, {"a": refusing_port(), "b": refusing_port(), "me": refusing_port()}, {"me"})
        run(conf)


def test_a_neighbour_that_dies_during_the_check_is_ignored(
    server: EtcdServer, refusing_port: Callable[[], int]
) -> None:
    """Its lease runs out while this node is still trying to reach it."""
    conf = settings(server.endpoint)
    with EtcdClient(server.endpoint) as client:
        train(client, conf, {"a": refusing_port()}, {"a"})
        lease, _ = client.grant(2.0)
        record = client.get(f"{conf.root}roll/members/a@i")
        assert record is not None
        client.put(record.key, record.value, lease)
        run(conf)


def test_one_silent_neighbour_of_three_does_not_keep_a_node_out(
    server: EtcdServer, capsys: pytest.CaptureFixture[str], refusing_port: Callable[[], int]
) -> None:
    """The fault is more likely the neighbour's; the remark names it."""
    conf = settings(server.endpoint)
    with EtcdClient(server.endpoint) as client, socket.create_server(("127.0.0.1", 0)) as there:
        port = there.getsockname()[1]
        train(client, conf, {"a": port, "b": refusing_port(), "c": port}, {"a", "b", "c"})
        run(conf)
    assert "admission: neighbours: b: 127.0.0.1:" in capsys.readouterr().err


def test_one_reachable_etcd_endpoint_is_enough(
    server: EtcdServer, capsys: pytest.CaptureFixture[str], refusing_port: Callable[[], int]
) -> None:
    """The unreachable one is named."""
    run(settings(f"{server.endpoint},127.0.0.1:{refusing_port()}"))
    assert "admission: etcd: etcd 127.0.0.1: 127.0.0.1:" in capsys.readouterr().err


def test_reasons_are_reported_even_without_etcd(tmp_path: Path, refusing_port: Callable[[], int]) -> None:
    """A fit node reports that etcd is missing, an unfit one what is wrong with itself."""
    conf = settings(f"127.0.0.1:{refusing_port()}", policy=Policy(below_minimum=1.0))
    with pytest.raises(EtcdUnavailable):
        run(conf)
    with pytest.raises(AdmissionFailed, match="devices: none"):
        run(conf, CheckResult(name="devices", ok=False, detail="none"))

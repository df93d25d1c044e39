"""Writes while members die: acknowledged ones are there, uncertain ones are reported as uncertain."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from chaos.servers.etcd import EtcdCluster, EtcdServer
from elastic3d.errors import EtcdUnavailable
from elastic3d.etcd import Compare, EtcdClient, Get, OutcomeUnknown, Put
from tests.etcd.etcd_helpers import wait_until

pytestmark = [pytest.mark.etcd, pytest.mark.long]


def test_acknowledged_writes_survive_the_death_of_etcds_leader(binary: Path) -> None:
    """Plain puts through the loss of a leader: the others raise, and may be there."""
    with EtcdCluster(3, binary=binary) as cluster, EtcdClient(cluster.endpoints) as client:
        acknowledged, uncertain, failed = set(), set(), set()
        killed = 0.0
        back = 0.0
        number = 0
        while not back or time.monotonic() < back + 0.5:
            if number == 100:
                cluster.leader().kill()
                killed = time.monotonic()
            assert not killed or time.monotonic() < killed + 20
            key = f"k/{number}"
            number += 1
            try:
                client.put(key, b"")
                acknowledged.add(key)
                if killed and not back:
                    back = time.monotonic()
            except OutcomeUnknown:
                uncertain.add(key)
            except EtcdUnavailable:
                failed.add(key)
        there = {kv.key for kv in client.range("k/")[0]}
        assert acknowledged <= there
        assert there <= acknowledged | uncertain, "a put that raised plain EtcdUnavailable was not applied"
        assert back - killed < 10


def test_the_outcome_of_a_swap_without_an_answer_can_be_read_back(one_binary: Path) -> None:
    """The server is stopped: the outcome is unknown within a deadline, and can be read later."""
    with EtcdServer(binary=one_binary) as server, EtcdClient(server.endpoints) as client:
        client.put("k", b"0")
        server.pause()
        began = time.monotonic()
        with pytest.raises(OutcomeUnknown, match="read it back"):
            client.txn([Compare.value("k", b"0")], [Put("k", b"mine")])
        assert time.monotonic() - began < 2.0
        server.resume()
        result = client.txn([Compare.value("k", b"0")], [Put("k", b"mine")], [Get("k")], idempotent=True)
        assert result.succeeded or result.gets[0][0].value == b"mine"


def test_one_stopped_member_costs_one_deadline(one_binary: Path) -> None:
    """There is no round robin: after the first call met a stopped follower, later ones avoid it."""
    with EtcdCluster(3, binary=one_binary) as cluster:
        leader = cluster.leader()
        victim = next(member for member in cluster.members if member is not leader)
        endpoints = [member.endpoint for member in cluster.members if member is not victim]
        endpoints.insert(os.getpid() % 3, victim.endpoint)  # where this process's client begins
        with EtcdClient(endpoints) as client:
            assert client.session.endpoints[client.session.order()[0]].port == victim.port
            client.put("k", b"")
            victim.pause()
            took = []
            for _ in range(200):
                began = time.monotonic()
                client.get("k")
                took.append(time.monotonic() - began)
            # Together they take as long as two busy members need: what counts is who waited for the third.
            assert [number for number, seconds in enumerate(took) if seconds > 0.9] == [0]
            assert took[0] < 3.0


def test_reads_wait_for_a_restarting_server(binary: Path) -> None:
    """Within their budget; what was written before is there."""
    with EtcdServer(binary=binary) as server, EtcdClient(server.endpoints, budget=15.0) as client:
        client.put("k", b"1")
        server.kill()
        with pytest.raises(EtcdUnavailable):
            client.get("k", budget=0.8)
        server.members[0].start()
        began = time.monotonic()
        item = client.get("k")
        assert item is not None
        assert item.value == b"1"
        assert time.monotonic() - began < 8.0


def test_no_server_outlives_its_owner(one_binary: Path) -> None:
    """When the owner is killed with SIGKILL its server dies too."""
    program = f"""
import time
from chaos.servers.etcd import EtcdServer
with EtcdServer(binary={str(one_binary)!r}) as server:
    print(server.members[0].pid, server._directory, flush=True)
    time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        pid, directory = owner.stdout.readline().split()
        owner.kill()
    try:
        wait_until(lambda: not Path(f"/proc/{pid}").exists() or _zombie(int(pid)))
    finally:
        subprocess.run(["rm", "-rf", directory], check=True)


def _zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True

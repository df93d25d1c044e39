"""Forks of a process that talks to etcd: no child waits for ever, and the parent goes on."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from chaos.etcd import EtcdServer

pytestmark = [pytest.mark.etcd, pytest.mark.long]

FORKS = 30

# In a process of its own: the tests' has used gRPC already, in ways that are not the point here.
SCRIPT = """
import os, signal, sys, threading
from elastic3d.errors import UsageError
from elastic3d.etcd import Changes, EtcdClient, LeaseKeeper, Watch

endpoint, forks = sys.argv[1], int(sys.argv[2])
client = EtcdClient(endpoint, budget=30.0)
delivered = threading.Semaphore(0)

def deliver(news):
    for change in news.changes if isinstance(news, Changes) else ():
        delivered.release()

watch, leases = Watch(client, "forks/", deliver), LeaseKeeper(client)
lease = leases.grant(60)

def refused(call):
    try:
        call()
    except UsageError as error:
        return "forked from one that had used etcd" in str(error) or "belongs to process" in str(error)
    return False

for number in range(forks):
    pid = os.fork()
    if pid == 0:
        signal.alarm(60)
        asked = refused(lambda: client.get("a")) and refused(lambda: EtcdClient(endpoint, budget=30.0).get("a"))
        # By the interpreter's own way out, which collects what gRPC left behind.
        sys.exit(0 if asked else 3)
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    assert code == 0, f"fork {number} ended with {code}"
    client.put(f"forks/{number}", b"", lease.id, idempotent=True)
    assert delivered.acquire(timeout=30), "the parent's watch is deaf"
assert lease.lost is None
client.close()
left = [name for name in ("GRPC_VERBOSITY", "GRPC_ENABLE_FORK_SUPPORT") if name in os.environ]
print("left in the environment:", *left)
"""


def test_no_child_of_many_forks_waits_for_ever(server: EtcdServer) -> None:
    """Each is told at once that it cannot, and ends; the parent's watch and lease go on over all of them.

    Nothing of ours stays in the environment, which workers inherit.
    """
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("GRPC_")}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, server.endpoint, str(FORKS)],
        env=inherited,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip() == "left in the environment:"

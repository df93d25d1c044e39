"""Forks of a process that talks to etcd: no child waits for ever, and the parent goes on."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from chaos.servers.etcd import EtcdServer

pytestmark = [pytest.mark.etcd, pytest.mark.long]

FORKS = 12

# In a process of its own: that of the tests has already used gRPC in other ways.
SCRIPT = """
import os, signal, sys, threading
from elastic3d.errors import UsageError
from elastic3d.etcd import Changes, EtcdClient, LeaseKeeper, Watch

endpoint, forks = sys.argv[1], int(sys.argv[2])
client = EtcdClient(endpoint, budget=30.0)
delivered = threading.Semaphore(0)
over = False

def deliver(news):
    for change in news.changes if isinstance(news, Changes) else ():
        delivered.release()

def keep_busy(name):
    while not over:
        client.put(name, b"", idempotent=True)

def child(number):
    signal.alarm(60)
    try:
        leases.revoke(lease)
        return 4
    except UsageError as error:
        if "make a new LeaseKeeper" not in str(error):
            return 5
    watch.close()
    leases.close()
    client.put(f"children/{number}", b"inherited", idempotent=True)
    with EtcdClient(endpoint, budget=30.0) as own:
        keeper = LeaseKeeper(own)
        kept = keeper.grant(60)
        own.put(f"children/{number}/own", b"", kept.id, idempotent=True)
        keeper.revoke(kept)
    if number == 0:
        grandchild = os.fork()
        if not grandchild:
            signal.alarm(60)
            sys.exit(0 if client.get("children/0").value == b"inherited" else 6)
        return os.waitstatus_to_exitcode(os.waitpid(grandchild, 0)[1])
    client.close()
    return 0

watch, leases = Watch(client, "forks/", deliver), LeaseKeeper(client)
lease = leases.grant(60)
busy = [threading.Thread(target=keep_busy, args=(f"busy/{number}",)) for number in range(2)]
for thread in busy:
    thread.start()
for number in range(forks):
    pid = os.fork()
    if pid == 0:
        # By the interpreter's own way out, which collects what gRPC left behind; the busy threads are the parent's.
        sys.exit(child(number))
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    assert code == 0, f"fork {number} ended with {code}"
    client.put(f"forks/{number}", b"", lease.id, idempotent=True)
    assert delivered.acquire(timeout=30), "the parent's watch delivers nothing"
over = True
for thread in busy:
    thread.join()
assert lease.lost is None
assert len(client.range("children/")[0]) == forks
client.close()
left = [name for name in ("GRPC_VERBOSITY", "GRPC_ENABLE_FORK_SUPPORT") if name in os.environ]
print("left in the environment:", *left)
"""


def test_no_child_of_many_forks_blocks(server: EtcdServer) -> None:
    """Each uses its parent's client and one of its own, while the parent's threads are busy with theirs.

    So does a child of a child. The parent's watch and lease stay its own and survive all forks. Nothing of ours stays
    in the environment, which workers inherit.
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

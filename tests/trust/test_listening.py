"""Ports that strangers cannot exhaust."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from elastic3d.trust.listening import Listener, Refusal, Refusals, Waiting, raise_file_limit
from tests.clocks import HandClock

CHILD = """\
import os, resource, socket, sys
from elastic3d.trust.listening import PAUSE, Listener, Refusals

told = []
listening = socket.create_server(("127.0.0.1", 0))
listening.setblocking(False)
listener = Listener(listening, Refusals("tiles", told.append))
caller = socket.create_connection(("127.0.0.1", listener.port))
spare = socket.socket()
most = len(os.listdir("/proc/self/fd")) + 8
resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
taken = []
try:
    while True:
        taken.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    pass
assert listener.accept() == 0.0, "the caller was not hung up on"
caller.settimeout(20)
assert caller.recv(1) == b""
assert listener.accept() == PAUSE, "the port spins"
for one in taken:
    os.close(one)
spare.connect(("127.0.0.1", listener.port))
listening.setblocking(True)
assert isinstance(listener.accept(), tuple)
print(told[0])
"""


def test_a_process_without_free_descriptors_rejects_callers_and_goes_on() -> None:
    """The port neither ends nor spins on a connection that it cannot accept, and it is reported."""
    done = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "port=tiles" in done.stdout
    assert "Too many open files" in done.stdout


def test_a_closed_port_accepts_nobody() -> None:
    """The accepting thread is informed, and ends."""
    listener = Listener(socket.create_server(("127.0.0.1", 0)), Refusals("tiles", lambda refusal: None))
    listener.socket.shutdown(socket.SHUT_RDWR)
    assert listener.accept() is None
    listener.close()
    assert listener.accept() is None


def test_a_flood_displaces_only_itself() -> None:
    """The oldest pending connection of the most crowded address is closed; those from elsewhere stay."""
    waiting: Waiting[str] = Waiting(4)
    assert waiting.add("friend", "10.0.0.2") is None
    gone = [waiting.add(f"flood-{number}", "10.6.6.6") for number in range(10)]
    assert gone[3:] == [f"flood-{number}" for number in range(7)]
    assert "friend" in waiting.all()
    waiting.remove("friend")
    assert len(waiting) == 3


def test_many_refusals_are_reported_as_a_count() -> None:
    """One line in ten seconds, and a number."""
    refusals: list[Refusal] = []
    clock = HandClock()
    refused = Refusals("links", refusals.append, clock=clock)
    clock.now += 100.0
    for _ in range(50):
        refused("10.6.6.6", "does not hold this run's secret")
    clock.now += 10.0
    refused("10.6.6.6", "does not hold this run's secret")
    assert [refusal.more for refusal in refusals] == [0, 49]


@pytest.fixture
def limits() -> Iterator[None]:
    """Restore the limit of descriptors."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_the_limit_of_descriptors_is_raised(limits: None) -> None:
    """To the maximum for the process, and never lowered."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 200, hard))
    raised = raise_file_limit()
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == raised
    assert raised >= 1024 or raised == hard

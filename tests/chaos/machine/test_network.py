"""Hosts on this machine whose cables are late, lossy or slow, whose connections are reset or forgotten: real TCP."""

from __future__ import annotations

import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from chaos.machine import network as module
from chaos.machine.impairments import Impairment
from chaos.machine.network import Network
from chaos.machine.processes import wait_until

pytestmark = [pytest.mark.netns, pytest.mark.timeout(120)]

ECHO = """
import socket
with socket.create_server(("", 0)) as server:
    print(server.getsockname()[1], flush=True)
    connection, _ = server.accept()
    with connection:
        while data := connection.recv(65536):
            connection.sendall(data)
"""

CALL = """
import socket, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2])), 60) as connection:
    print("connected", flush=True)
    for line in sys.stdin:
        left = size = int(line)
        connection.sendall(bytes(size))
        while left:
            left -= len(connection.recv(65536))
        print(size, flush=True)
"""

MAKER = """
import time
from chaos.machine.impairments import Impairment
from chaos.machine.network import Network
from chaos.machine.processes import wait_until
with Network() as network:
    network.add("a")
    network.impair("a", Impairment(late=0.1))
    print(network.within("a")[-1].rpartition("-")[0], flush=True)
    time.sleep(600)
"""


@pytest.fixture
def network() -> Iterator[Network]:
    try:
        with Network() as network:
            network.add("a")
            network.add("b")
            yield network
    except OSError as error:
        pytest.skip(f"no hosts can be made here: {error}")


class Call:
    """A connection from host a to an echo on host b."""

    def __init__(self, network: Network) -> None:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        self.echo = subprocess.Popen([*network.within("b"), sys.executable, "-c", ECHO], **pipes)
        assert self.echo.stdout is not None
        port = self.echo.stdout.readline().strip()
        command = [*network.within("a"), sys.executable, "-c", CALL, network.address_of("b"), port]
        self.call = subprocess.Popen(command, **pipes)
        assert self.call.stdout is not None
        assert self.call.stdout.readline() == "connected\n"

    def seconds(self, size: int) -> float:
        """Send so many bytes and get them back; return how long that took."""
        assert self.call.stdin is not None
        assert self.call.stdout is not None
        began = time.monotonic()
        self.call.stdin.write(f"{size}\n")
        self.call.stdin.flush()
        assert self.call.stdout.readline() == f"{size}\n"
        return time.monotonic() - began

    def close(self) -> str:
        """End both ends and return what the caller complained of."""
        _, said = self.call.communicate(timeout=30)
        self.echo.communicate(timeout=30)
        return said


@pytest.fixture
def call(network: Network) -> Iterator[Call]:
    made = Call(network)
    yield made
    for process in (made.call, made.echo):
        process.kill()
        process.communicate()


def test_a_cable_that_is_late(network: Network, call: Call) -> None:
    """Both ways, for as long as it is impaired. Nothing is lost by it."""
    network.impair("a", Impairment(late=0.5))
    assert not network.plugged("a")
    assert call.seconds(1) >= 1.0
    assert network.repair("a") == 0
    assert network.plugged("a")
    assert min(call.seconds(1) for _ in range(5)) < 1.0
    assert call.close() == ""


def test_a_cable_that_loses_packets(network: Network, call: Call) -> None:
    """It does lose some, and what is lost is sent again: everything arrives."""
    network.impair("b", Impairment(loss=0.1))
    for _ in range(40):
        call.seconds(20_000)
    assert network.repair("b") > 0
    assert call.close() == ""


def test_a_slow_cable(network: Network, call: Call) -> None:
    """A megabyte at four megabytes a second takes a quarter of a second, and each way has its own rate."""
    network.impair("a", Impairment(rate=4e6))
    assert call.seconds(1_000_000) >= 0.25
    network.repair("a")
    assert call.close() == ""


def test_connections_are_reset(network: Network, call: Call) -> None:
    """Those between the two hosts, at both ends; another one can be made at once."""
    call.seconds(1)
    assert len(network.connections("a", "b")) == 1
    assert network.reset("a", "b") == 1
    assert call.call.stdin is not None
    call.call.stdin.write("1\n")
    assert "Connection" in call.close()
    assert not network.connections("a", "b")
    assert network.reset("a", "b") == 0
    again = Call(network)
    again.seconds(1)
    assert again.close() == ""


def test_connections_are_forgotten(network: Network, call: Call) -> None:
    """What is on them vanishes, without an end; a new one is well, and what was sent meanwhile arrives at last."""
    call.seconds(1)
    assert network.connections("a") == network.connections("b")
    network.impair("a", Impairment(forgets=True))
    assert call.call.stdin is not None
    assert call.call.stdout is not None
    call.call.stdin.write("1\n")
    call.call.stdin.flush()
    again = Call(network)
    again.seconds(100_000)
    assert again.close() == ""
    assert not select.select([call.call.stdout], (), (), 1.0)[0]
    assert network.repair("a") > 0
    assert call.call.stdout.readline() == "1\n"
    assert call.close() == ""


def test_nothing_is_left(network: Network) -> None:
    """Also of a cable that is impaired when the network is closed."""
    network.impair("a", Impairment(late=0.01))
    mark = network.within("a")[-1].rpartition("-")[0]
    network.close()
    for command in (["ip", "link", "show"], ["ip", "netns", "list"]):
        assert mark not in subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_nothing_is_left_where_a_person_ends_it_while_it_is_closed(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C may come when the job is over; no second one comes through."""
    ip, commands = module._ip, []

    def interrupted(*arguments: str, check: bool = True) -> str:
        commands.append(arguments)
        if len(commands) == 2:
            raise SystemExit(130)
        return ip(*arguments, check=check)

    mark = network.within("a")[-1].rpartition("-")[0]
    monkeypatch.setattr(module, "_ip", interrupted)
    with pytest.raises(SystemExit):
        network.close()
    assert not [name for name in names() if name.startswith(mark)]


def test_the_networks_of_a_killed_maker_are_removed(network: Network) -> None:
    """By whoever makes one next; not those of one that lives, and what it has impaired goes, too."""
    with subprocess.Popen([sys.executable, "-c", MAKER], stdout=subprocess.PIPE, text=True) as maker:
        assert maker.stdout is not None
        mark = maker.stdout.readline().strip()
        try:
            with Network():
                assert {f"{mark}br", f"{mark}v0", f"{mark}v0m", f"{mark}-a"} <= names()
        finally:
            maker.kill()
    with Network():
        assert not [name for name in names() if name.startswith(mark)]
    assert network.within("a")[-1] in names()


def test_networks_of_one_process_have_names_of_their_own() -> None:
    """However many there are at a time, up to some hundreds."""
    assert len({Network()._mark for _ in range(0x100)}) == 0x100


def names() -> set[str]:
    """Return the names of all links and namespaces."""
    links = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout
    spaces = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return {line.split()[1].rstrip(":").partition("@")[0] for line in links.splitlines()} | {*spaces.split()}


def test_two_networks_that_draw_the_same_subnet_at_once_do_not_share_it(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has looked which are free before the other has taken one."""
    ip, taken = module._ip, int(network.address.split(".")[2])
    free = [taken, *(number for number in range(256) if number != taken)]

    def looked_before(*arguments: str, check: bool = True) -> str:
        return "" if arguments[:3] == ("-4", "route", "show") else ip(*arguments, check=check)

    monkeypatch.setattr(module, "_ip", looked_before)
    monkeypatch.setattr(module.random, "choice", lambda _: int(network.address.split(".")[1]))
    monkeypatch.setattr(module.random, "randrange", lambda _: free.pop(0))
    with Network() as other:
        assert other.address.split(".")[:3] != network.address.split(".")[:3]


def test_what_a_host_sends_is_counted(network: Network, call: Call) -> None:
    """With headers, and also where its cable is impaired; what it is sent is not."""
    for impaired in (False, True):
        if impaired:
            network.impair("a", Impairment(late=0.05))
        before = network.sent("a")
        call.seconds(100_000)
        assert 100_000 <= network.sent("a") - before < 150_000


def test_a_process_that_still_runs_on_a_host_is_named(network: Network) -> None:
    """Whoever started it, and however it is marked: none outlives the job."""
    with subprocess.Popen([*network.within("b"), "sleep", "600"]) as process:
        try:
            assert wait_until(lambda: network.occupied(patience=0) != [], 5)
            assert network.occupied(patience=0) == [f"process {process.pid} on the host of b"]
        finally:
            process.kill()
    assert network.occupied() == []


def test_a_host_that_is_added_cuts_off_none_before_it(network: Network) -> None:
    """Whatever Ethernet address its cable has: all others send to the bridge's as they know it."""
    with socket.create_server((network.address, 0)) as server:
        server.settimeout(5)

        def reaches(host: str) -> bool:
            dial = f"import socket; socket.create_connection(({network.address!r}, {server.getsockname()[1]}), 3)"
            dialled = subprocess.run([*network.within(host), sys.executable, "-c", dial], check=False)
            return dialled.returncode == 0

        # A bridge without an address of its own has the lowest of its cables'.
        module._ip("link", "set", network._cable("a"), "address", "02:00:00:00:00:02")
        assert reaches("b")
        network.add("c")
        module._ip("link", "set", network._cable("c"), "address", "02:00:00:00:00:01")
        assert [reaches(host) for host in ("a", "b", "c")] == [True] * 3

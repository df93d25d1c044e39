"""A stranger finds the ports of a process, connects to them as it is told, and leaves nothing behind."""

from __future__ import annotations

import os
import select
import socket

import pytest

from chaos.machine.leftovers import ports_left
from chaos.machine.processes import wait_until
from chaos.machine.strangers import How, Stranger, listeners, sockets


def test_the_sockets_of_a_process_are_those_that_listen() -> None:
    """By their inodes, with address and port, of both families; connections are none."""
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("::1", 0), family=socket.AF_INET6) as two:
        with socket.create_connection(one.getsockname()):
            own = sockets([os.getpid()])
        expected = {str(os.fstat(one.fileno()).st_ino): one.getsockname()[:2]}
        expected[str(os.fstat(two.fileno()).st_ino)] = two.getsockname()[:2]
        assert {inode: own[inode] for inode in expected} == expected
        assert expected.items() <= listeners().items()
    assert not expected.keys() & {*sockets([os.getpid()]), *listeners()}


def test_a_process_that_is_gone_listens_nowhere() -> None:
    """It may end while it is looked at."""
    assert sockets([2**22 + 1]) == {}


@pytest.mark.parametrize("how", How)
def test_a_stranger_connects_again_and_again(how: How) -> None:
    """It says nothing, or what nobody understands; after its end no connection is open."""
    with socket.create_server(("127.0.0.1", 0), backlog=128) as server:
        stranger = Stranger([server.getsockname()], how)
        try:
            connection, _ = server.accept()
            with connection:
                patience = 30.0 if how is How.GARBAGE else 0.2
                said = connection.recv(100_000) if select.select([connection], [], [], patience)[0] else b""
                assert bool(said) is (how is How.GARBAGE)
                if how is How.FLOOD:
                    assert wait_until(lambda: stranger.connections > 20, 5)
        finally:
            stranger.close()


def test_a_port_that_somebody_still_has_is_left_over() -> None:
    """A child that was started with it, for instance; the node is named that listened there."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        seen = {inode: ("node1", port) for inode, port in sockets([os.getpid()]).items()}
        number = server.getsockname()[1]
        kept = os.dup(server.fileno())
    assert f"port {number} of 127.0.0.1, on which node1 listened" in ports_left(seen, patience=0)
    os.close(kept)
    assert f"port {number} of 127.0.0.1, on which node1 listened" not in ports_left(seen, patience=0)


def test_a_stranger_that_says_nothing_stays_until_it_is_sent_away() -> None:
    """It is the other end that closes, and then it comes again."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        stranger = Stranger([server.getsockname()], How.SILENT)
        try:
            first, _ = server.accept()
            assert not select.select([first], [], [], 0.6)[0]
            first.close()
            assert wait_until(lambda: stranger.connections >= 3, 5)
        finally:
            stranger.close()

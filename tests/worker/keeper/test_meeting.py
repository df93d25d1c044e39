"""The store in which a generation's process groups meet: where it listens, and what it keeps."""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch._C._distributed_c10d import PrefixStore, TCPStore

from elastic3d.worker.keeper.meeting import Meeting


@pytest.fixture
def meeting() -> Iterator[Meeting]:
    """A store on the loopback address."""
    meeting = Meeting("127.0.0.1")
    yield meeting
    meeting.close()


def listens_on(port: int) -> list[str]:
    """Return the addresses of this machine on which a port is open."""
    addresses = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            local, state = line.split()[1], line.split()[3]
            address, _, number = local.partition(":")
            if state == "0A" and int(number, 16) == port:
                # Each group of four bytes in the machine's own order.
                words = [bytes.fromhex(address[i : i + 8])[::-1] for i in range(0, len(address), 8)]
                addresses.append(str(ipaddress.ip_address(b"".join(words))))
    return addresses


def test_the_meeting_store_listens_only_on_the_nodes_address(meeting: Meeting) -> None:
    """torch's own choice is every interface of the machine."""
    assert listens_on(meeting.port) == ["127.0.0.1"]


def test_keys_of_earlier_generations_are_removed(meeting: Meeting) -> None:
    """Groups of a job that re-forms for months meet in a store that does not grow."""
    guest = TCPStore("127.0.0.1", meeting.port, is_master=False, wait_for_workers=False)
    for key in ("1.4", "9.17", "10.21", "10.22"):
        PrefixStore(key, guest).set("address", b"here")
    meeting.forget(before=10)
    deadline = time.monotonic() + 60
    while set(meeting.keys()) != {"10.21/address", "10.22/address"}:
        assert time.monotonic() < deadline, meeting.keys()
        time.sleep(0.01)
    assert PrefixStore("10.22", guest).get("address") == b"here"


def test_an_address_of_another_host_is_an_error() -> None:
    """Nobody could meet there, and listening everywhere instead would be wrong."""
    with pytest.raises(OSError, match=r"assign"):
        Meeting("192.0.2.1")

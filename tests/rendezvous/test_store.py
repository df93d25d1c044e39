"""The store of one generation: waits last as long as the generation, whatever becomes of its server."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.utils.store import barrier

from elastic3d.rendezvous.store import GenerationOver, GenerationStore, attend

SERVER = """\
import sys
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


class Meeting:
    """A server in a process of its own and the stores of two agents, whose generation can end."""

    def __init__(self) -> None:
        self.server = subprocess.Popen(
            [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.server.stdout is not None
        self.port = int(self.server.stdout.readline())
        self.is_over = False
        self.finished: list[int] = []

    def agent(self, rank: int, *, admitted: bool = True) -> GenerationStore:
        client = TCPStore("127.0.0.1", self.port, is_master=False, timeout=timedelta(seconds=2))
        prefixed = PrefixStore("1.1", client)
        store = GenerationStore(prefixed, rank, 2, lambda: self.is_over, lambda: self.finished.append(rank))
        if admitted:
            store.admit()
        return store

    def end_in(self, seconds: float) -> None:
        threading.Timer(seconds, lambda: setattr(self, "is_over", True)).start()

    def close(self) -> None:
        self.server.kill()
        self.server.communicate()


@pytest.fixture
def meeting() -> Iterator[Meeting]:
    """A meeting of two."""
    meeting = Meeting()
    yield meeting
    meeting.close()


def test_values_travel(meeting: Meeting) -> None:
    """What one sets another gets, as text or bytes, alone or several; a get waits for it."""
    a, b = meeting.agent(0), meeting.agent(1)
    a.multi_set(["x", "y"], ["1", "2"])
    threading.Timer(0.3, lambda: a.set("z", b"3")).start()
    assert b.multi_get(["z", "y", "x"]) == [b"3", b"2", b"1"]
    assert b.get("z") == b"3"
    assert [a.add("n", 2), b.add("n", 1)] == [2, 3]


def test_torchs_exit_barrier(meeting: Meeting) -> None:
    """torchrun's own barrier works on it, and each agent's arrival is told as its end of work."""
    stores = [meeting.agent(0), meeting.agent(1)]
    threads = [
        threading.Thread(target=barrier, args=(store, 2, "torchelastic/agent/terminal_state", 300)) for store in stores
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=5)
        assert not thread.is_alive()
    assert sorted(meeting.finished) == [0, 1]


def test_the_barrier_ends_with_the_generation(meeting: Meeting) -> None:
    """An agent that waits for one that died gets out, without an exception."""
    meeting.end_in(0.3)
    barrier(meeting.agent(0), 2, "torchelastic/agent/terminal_state", 300)


def test_numbering_workers_ends_with_the_generation(meeting: Meeting) -> None:
    """Both sides of torchrun's numbering get something it can read: as many workers elsewhere as here."""
    meeting.end_in(0.3)
    first, second = meeting.agent(0), meeting.agent(1)
    first.set("torchelastic/role_info/0", b'{"mine": 1}')
    assert first.multi_get([f"torchelastic/role_info/{i}" for i in range(2)]) == [b'{"mine": 1}'] * 2
    assert json.loads(second.get("torchelastic/assigned_ranks/1")) == [1, 2, 1, 2]


def test_before_torchrun_is_in_charge_the_end_is_an_exception(meeting: Meeting) -> None:
    """The handler itself then waits for the next generation."""
    store = meeting.agent(1, admitted=False)
    meeting.end_in(0.3)
    with pytest.raises(GenerationOver):
        store.get("MASTER_ADDR")


def test_a_dead_server_is_waited_out(meeting: Meeting) -> None:
    """When the server dies, nothing fails before the generation ends; it is the membership's to say."""
    store = meeting.agent(1)
    meeting.server.kill()
    meeting.end_in(0.5)
    assert json.loads(store.get("torchelastic/assigned_ranks/1")) == [1, 2, 1, 2]
    assert store.add("n", 1) == 0


def test_a_stopped_server_is_waited_out(meeting: Meeting) -> None:
    """A server whose host hangs holds nobody: TCPStore's own calls would wait for it for ever."""
    store = meeting.agent(1)
    meeting.server.send_signal(signal.SIGSTOP)
    meeting.end_in(0.5)
    began = time.monotonic()
    assert json.loads(store.get("torchelastic/assigned_ranks/1")) == [1, 2, 1, 2]
    with pytest.raises(GenerationOver):
        attend(lambda: meeting.agent(1), lambda: meeting.is_over)
    assert time.monotonic() - began < 2

"""The store of one generation: waits last as long as the generation, whatever happens to its server."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.elastic.utils.store import barrier

from elastic3d.errors import UsageError
from elastic3d.etcd_server.certificates import Certificates
from elastic3d.rendezvous.seat import GenerationOver, Seat
from elastic3d.rendezvous.store import GenerationStore
from elastic3d.rendezvous.table import KeyTableServer
from elastic3d.trust.channel import WireError, dial
from elastic3d.trust.credentials import Credentials
from elastic3d.trust.handshake import PortRole
from elastic3d.trust.listening import Refusal

CREDENTIALS = Credentials(secret="5e" * 32, id="a@1")

SERVER = """\
import sys
from elastic3d.rendezvous.table import KeyTableServer
from elastic3d.trust.credentials import Credentials
tell = lambda refusal: print(refusal, flush=True)
table = KeyTableServer("127.0.0.1", Credentials(secret=sys.argv[1], id="a@1"), refused=tell)
print(table.port, flush=True)
sys.stdin.read()
"""


class Meeting:
    """A server in a process of its own and the stores of two agents, whose generation can end."""

    def __init__(self) -> None:
        self.server = subprocess.Popen(
            [sys.executable, "-c", SERVER, CREDENTIALS.secret], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.server.stdout is not None
        self.port = int(self.server.stdout.readline())
        self.is_over = False
        self.finished: list[int] = []
        self.seats: list[Seat] = []

    def agent(self, rank: int, *, admitted: bool = True) -> GenerationStore:
        self.seats.append(Seat("127.0.0.1", self.port, "1.1/", lambda: self.is_over, lambda: CREDENTIALS))
        store = GenerationStore(self.seats[-1], rank, 2, lambda: self.finished.append(rank))
        if admitted:
            store.admit()
        return store

    def end_in(self, seconds: float) -> None:
        threading.Timer(seconds, lambda: setattr(self, "is_over", True)).start()

    def close(self) -> None:
        for seat in self.seats:
            seat.close()
        self.server.kill()
        self.server.communicate()


@pytest.fixture
def meeting() -> Iterator[Meeting]:
    """A meeting of two."""
    meeting = Meeting()
    yield meeting
    meeting.close()


def test_a_value_set_by_one_node_is_read_by_another(meeting: Meeting) -> None:
    """As text or bytes, alone or several; a get waits for it."""
    a, b = meeting.agent(0), meeting.agent(1)
    a.multi_set(["x", "y"], ["1", "2"])
    threading.Timer(0.3, lambda: a.set("z", b"3")).start()
    assert b.multi_get(["z", "y", "x"]) == [b"3", b"2", b"1"]
    assert b.get("z") == b"3"
    assert [a.add("n", 2), b.add("n", 1)] == [2, 3]


def test_a_signal_in_a_wait_does_not_spoil_the_next_answer(meeting: Meeting) -> None:
    """torchrun's handlers raise out of a wait; the answer that comes later is not taken for another question's."""
    a, b = meeting.agent(0), meeting.agent(1)
    before = signal.signal(signal.SIGUSR1, lambda number, frame: 1 // 0)
    try:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        with pytest.raises(ZeroDivisionError):
            a.get("late")
    finally:
        signal.signal(signal.SIGUSR1, before)
    b.set("late", b"wrong")
    b.set("other", b"right")
    assert a.get("other") == b"right"


def test_a_broken_connection_is_replaced(meeting: Meeting) -> None:
    """torchrun does not notice one that the network dropped, and no amount is added twice."""
    a = meeting.agent(0)
    assert a.add("n", 1) == 1
    connection = meeting.seats[0]._socket
    assert connection is not None
    connection.shutdown(socket.SHUT_RDWR)
    assert a.add("n", 1) == 2


def test_an_amount_is_added_once(meeting: Meeting) -> None:
    """The same request, repeated because its answer was lost, gets the same answer."""
    seat = meeting.agent(0) and meeting.seats[0]
    assert [seat._ask(["add", "n", 2, "token"]) for _ in range(2)] == [2, 2]
    assert seat._ask(["add", "n", 2, "another"]) == 4


def test_connections_of_strangers_are_closed(meeting: Meeting) -> None:
    """One that does not speak the table's protocol; the others do not notice."""
    for nonsense in (b"GET / HTTP/1.0\r\n\r\n", b"\0\0\0\2{}", b"\0\0\0\1\xff"):
        with socket.create_connection(("127.0.0.1", meeting.port), timeout=5) as stranger:
            stranger.sendall(nonsense)
            assert stranger.recv(1) == b""
    assert meeting.agent(0).add("n", 1) == 1


def test_a_long_answer_arrives_whole(meeting: Meeting) -> None:
    """An answer longer than any socket's buffer is sent in pieces."""
    a = meeting.agent(0)
    value = bytes(range(256)) * 2**12
    a.set("long", value)
    assert a.multi_get(["long", "long"]) == [value, value]


def test_torchruns_exit_barrier_works(meeting: Meeting) -> None:
    """Each agent's arrival is reported as its end of work."""
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


def test_the_exit_barrier_ends_with_the_generation(meeting: Meeting) -> None:
    """An agent that waits for a dead one gets out, without an exception."""
    meeting.end_in(0.3)
    barrier(meeting.agent(0), 2, "torchelastic/agent/terminal_state", 300)


def test_numbering_workers_ends_with_the_generation(meeting: Meeting) -> None:
    """Both sides of torchrun's numbering get a readable answer: as many workers elsewhere as here."""
    meeting.end_in(0.3)
    first, second = meeting.agent(0), meeting.agent(1)
    first.set("torchelastic/role_info/0", b'{"mine": 1}')
    assert first.multi_get([f"torchelastic/role_info/{i}" for i in range(2)]) == [b'{"mine": 1}'] * 2
    assert json.loads(second.get("torchelastic/assigned_ranks/1")) == [1, 2, 1, 2]


def test_before_torchrun_takes_over_the_end_of_a_generation_is_an_exception(meeting: Meeting) -> None:
    """The handler itself then waits for the next generation."""
    store = meeting.agent(1, admitted=False)
    meeting.end_in(0.3)
    with pytest.raises(GenerationOver):
        store.get("MASTER_ADDR")


def test_a_dead_server_is_waited_out(meeting: Meeting) -> None:
    """When the server dies nothing fails before the generation ends, which is up to the membership."""
    store = meeting.agent(1)
    meeting.server.kill()
    meeting.end_in(0.5)
    assert json.loads(store.get("torchelastic/assigned_ranks/1")) == [1, 2, 1, 2]
    assert store.add("torchelastic/agent/terminal_state/num_members", 1) == 0


def test_a_stopped_server_is_waited_out(meeting: Meeting) -> None:
    """A server on a hanging host blocks neither connected nor new clients."""
    store = meeting.agent(1)
    meeting.server.send_signal(signal.SIGSTOP)
    meeting.end_in(0.5)
    began = time.monotonic()
    assert json.loads(store.get("torchelastic/assigned_ranks/1")) == [1, 2, 1, 2]
    with pytest.raises(GenerationOver):
        meeting.agent(1, admitted=False).get("MASTER_ADDR")
    assert time.monotonic() - began < 2


def test_keys_of_earlier_generations_are_removed() -> None:
    """The table of a job that re-forms for months does not grow; later keys, and those of others, stay."""
    table = KeyTableServer("127.0.0.1", CREDENTIALS)
    seats = {
        root + key: Seat("127.0.0.1", table.port, f"{root}{key}/", lambda: False, lambda: CREDENTIALS)
        for root, key in (("a/", "1.4"), ("a/", "2.9"), ("a/", "3.1"), ("b/", "1.1"))
    }
    try:
        for seat in seats.values():
            seat.set("name", b"value")
            seat.add("count", 1)
        table.forget("a/", 3)
        deadline = time.monotonic() + 60
        while {key.rpartition("/")[0] for key in table._values} != {"a/3.1", "b/1.1"}:
            assert time.monotonic() < deadline, table._values
            time.sleep(0.01)
        assert len(table._answers) == 2
        assert seats["a/3.1"].get(["name"]) == [b"value"]
        assert seats["a/3.1"].add("count", 1) == 2
    finally:
        for seat in seats.values():
            seat.close()
        table.close()


def test_nested_json_ends_a_connection_and_not_the_table(meeting: Meeting) -> None:
    """Sent by a member of the run; a stranger gets no message through, and is reported."""
    with socket.create_connection(("127.0.0.1", meeting.port), timeout=20) as one:
        channel = dial(one, CREDENTIALS, PortRole.TABLE)
        channel.send_sealed(b"[" * 200_000)
        with contextlib.suppress(ConnectionError):
            assert one.recv(1) == b""
    with socket.create_connection(("127.0.0.1", meeting.port), timeout=20) as stranger:
        with pytest.raises(WireError, match="does not hold this run's secret"):
            dial(stranger, Credentials(secret="a1" * 32, id="a@1"), PortRole.TABLE)
    assert meeting.agent(0).add("n", 1) == 1
    assert meeting.server.stdout is not None
    assert "port=table peer=127.0.0.1" in meeting.server.stdout.readline()


def test_unauthenticated_connections_are_closed(meeting: Meeting) -> None:
    """A silent crowd loses its connections, and keeps nobody out."""
    crowd = [socket.create_connection(("127.0.0.1", meeting.port), timeout=30) for _ in range(100)]
    assert meeting.agent(0).add("n", 1) == 1
    for one in crowd:
        with one, contextlib.suppress(ConnectionError):
            assert one.recv(1) == b""


FLOOD = """\
import socket, sys
held = []
print("begun", flush=True)
while True:
    one = socket.socket()
    one.settimeout(5)
    try:
        one.connect(("127.0.0.1", int(sys.argv[1])))
    except OSError:
        pass
    held.append(one)
    if len(held) > 500:
        held.pop(0).close()
"""


def test_a_lasting_flood_of_strangers_holds_up_no_member(meeting: Meeting) -> None:
    """Connecting faster than the table accepts neither stops its answers nor keeps members out."""
    known = meeting.agent(0)
    assert known.add("n", 1) == 1
    flood = [
        subprocess.Popen([sys.executable, "-S", "-E", "-c", FLOOD, str(meeting.port)], stdout=subprocess.PIPE)
        for _ in range(2)
    ]
    try:
        for one in flood:
            assert one.stdout is not None
            assert one.stdout.readline()
        meeting.end_in(60.0)
        assert [known.add("n", 1) for _ in range(20)] == list(range(2, 22))
        assert meeting.agent(1).add("n", 1) == 22
    finally:
        for one in flood:
            one.kill()
            one.communicate()


@pytest.fixture
def encrypted(certificates: Certificates) -> Credentials:
    """The credentials of a node with a certificate."""
    return replace(CREDENTIALS, certificate=str(certificates.client), key=str(certificates.client_key))


def test_an_encrypted_table_works_like_a_plain_one(encrypted: Credentials) -> None:
    """A get that waits, counters, data that fills the buffers, and a replaced connection."""
    table = KeyTableServer("127.0.0.1", encrypted)
    seats = [Seat("127.0.0.1", table.port, "1.1/", lambda: False, lambda: encrypted) for _ in range(2)]
    try:
        first, second = seats
        late = threading.Timer(0.2, lambda: first.set("late", b"3"))
        late.start()
        assert second.get(["late"]) == [b"3"]
        late.join()
        value = bytes(range(256)) * 2**12
        first.set("long", value)
        assert second.get(["long", "long"]) == [value, value]
        first.close()
        assert [first.add("n", 1), second.add("n", 1)] == [1, 2]
    finally:
        for seat in seats:
            seat.close()
        table.close()


@pytest.mark.parametrize("at_table", [True, False])
def test_different_encryption_of_table_and_seat_is_reported(encrypted: Credentials, at_table: bool) -> None:
    """A mistake in one node's settings is reported by both, and ends neither."""
    theirs: queue.SimpleQueue[Refusal] = queue.SimpleQueue()
    ours: queue.SimpleQueue[Refusal] = queue.SimpleQueue()
    table = KeyTableServer("127.0.0.1", encrypted if at_table else CREDENTIALS, refused=theirs.put)
    refusals: list[Refusal] = []

    def heard(refusal: Refusal) -> None:
        refusals.append(refusal)
        ours.put(refusal)

    dials = CREDENTIALS if at_table else encrypted
    seat = Seat("127.0.0.1", table.port, "1.1/", lambda: bool(refusals), lambda: dials, refused=heard)
    good = Seat("127.0.0.1", table.port, "1.1/", lambda: False, lambda: encrypted if at_table else CREDENTIALS)
    try:
        with pytest.raises(GenerationOver):
            seat.set("name", b"value")
        for refusal in (ours.get(timeout=60), theirs.get(timeout=60)):
            assert "give cert= and key= to every node of the run, or to none" in refusal.reason
        assert good.add("n", 1) == 1
    finally:
        seat.close()
        good.close()
        table.close()


def outcome(call: Callable[[], object]) -> object:
    """Return what a call returns, or the kind of its error."""
    try:
        return call()
    except dist.DistError as error:
        return type(error)


def results(store: Store) -> list[object]:
    """Return a store's answers to every possible call."""
    store.set("a", "1")
    store.multi_set(["b", "c"], ["2", "\0x"])
    store.append("a", "+")
    store.append("new", "first")
    outcomes: list[object] = [
        *(store.get(key) for key in ("a", "c", "new")),
        store.multi_get(["b", "a"]),
        *(store.add("n", amount) for amount in (3, -1)),
        *(store.check(keys) for keys in ([], ["a", "n"], ["a", "none"])),
        *(store.compare_set("b", *values) for values in (("wrong", "x"), ("2", "y"))),
        *(store.compare_set("s", *values) for values in (("wrong", "x"), ("", "y"), ("", "z"), ("y", "z"))),
        store.num_keys(),
        *(store.delete_key("b") for _ in range(2)),
        store.num_keys(),
        store.has_extended_api(),
        store.wait(["a"]),
        store.wait(["a", "n"], timedelta(seconds=60)),
        outcome(lambda: store.wait(["none"], timedelta(milliseconds=100))),
    ]
    store.set_timeout(timedelta(milliseconds=100))
    outcomes += [store.timeout, outcome(lambda: store.get("none")), outcome(lambda: store.wait(["none"]))]
    outcomes += [outcome(lambda: store.multi_get(["a", "none"]))]
    store.set_timeout(timedelta(seconds=60))
    return [*outcomes, store.timeout]


@pytest.mark.parametrize("prefixed", [False, True])
def test_the_store_answers_like_torchs_own(meeting: Meeting, prefixed: bool) -> None:
    """To Python and, through a PrefixStore, to torch's C++ code."""
    ours: Store = meeting.agent(0)
    theirs: Store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert results(PrefixStore("p", ours) if prefixed else ours) == results(
        PrefixStore("p", theirs) if prefixed else theirs
    )


def test_process_groups_meet_in_the_store(meeting: Meeting) -> None:
    """It is given to `init_process_group`."""
    sums = {}

    def take_part(rank: int, store: Store) -> None:
        group = dist.ProcessGroupGloo(PrefixStore("group", store), rank, 2, timedelta(seconds=60))
        one = torch.tensor([rank + 1.0])
        group.allreduce([one]).wait()
        sums[rank] = float(one)

    threads = [threading.Thread(target=take_part, args=(rank, meeting.agent(rank))) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert sums == {0: 3.0, 1: 3.0}


def test_using_the_store_beyond_its_generation_is_an_error(meeting: Meeting) -> None:
    """Stand-in answers are for torchrun's agents alone. Nonsense is an error, not a wait."""
    store = meeting.agent(0)
    store.set("word", "x")
    with pytest.raises(UsageError, match="not a number"):
        store.add("word", 1)
    with pytest.raises(UsageError, match="have at most"):
        store.set("long", bytes(9 * 2**20))
    meeting.end_in(0.0)
    with pytest.raises(dist.DistNetworkError, match="this store's generation is over"):
        store.get("none")

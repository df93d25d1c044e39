"""Snapshots between slots: replicated, offered, fetched, verified, over real sockets."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from checkpointing.errors import SourceError
from checkpointing.format.tiles import Box, TensorSpec
from checkpointing.format.tiles import digest as tile_digest
from checkpointing.reading.resolver import resolve
from elastic3d.etcd_server.certificates import Certificates
from elastic3d.snapshots import client, replicate, wire
from elastic3d.snapshots import table as tables
from elastic3d.snapshots.client import PeerSource, inventories
from elastic3d.snapshots.holdings import Mark
from elastic3d.snapshots.memory import SnapshotMemory
from elastic3d.snapshots.permits import REPLICAS
from elastic3d.snapshots.replicate import Replicator
from elastic3d.snapshots.server import TileServer
from elastic3d.trust.channel import Channel, WireError
from elastic3d.trust.credentials import Credentials
from elastic3d.trust.listening import Refusal

SHAPE = (1200, 1024)
SECRET = "5e" * 32
READER = Credentials(secret=SECRET, id="9@1")
STRANGER = Credentials(secret="a1" * 32, id="0@1")
REPLICA_BYTES = 64 << 20


class Place:
    """One slot's memory, server and replicator."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.credentials = Credentials(secret=SECRET, id=f"{rank}@1")
        self.refused: list[Refusal] = []
        self.memory = SnapshotMemory(replica_bytes=REPLICA_BYTES)
        self.server = TileServer(self.memory, host="127.0.0.1", refused=self.refused.append)
        self.address = f"127.0.0.1:{self.server.port}"
        self.held: list[Mark] = []
        self.digested: list[Mark] = []
        self.replicator = Replicator(
            self.memory, digested=self.digested.append, ended=lambda m, new, *_: new and self.held.append(m)
        )
        self.server.set_credentials(self.credentials)
        self.replicator.set_credentials(self.credentials)
        self.credits: list[int] = []

    def begin(self, generation: int, base: Mark | None = None) -> None:
        """Enter a generation."""
        self.server.sealed(generation, ("0@1", "1@1"))
        self.memory.set_generation(generation)
        self.memory.restored(generation, base)

    def write(self, mark: Mark) -> bytes:
        """Write a snapshot as a trainer would; return its bytes."""
        whole = TensorSpec(key="model/w", dtype="float32", shape=(SHAPE[0] * 2, SHAPE[1]))
        scalar = TensorSpec(key=f"optimizer/w{self.rank}/step", dtype="float32", shape=())
        low = self.rank * SHAPE[0]
        table = tables.lay_out(
            [(whole, Box(start=(low, 0), stop=(low + SHAPE[0], SHAPE[1]))), (scalar, Box(start=(), stop=()))]
        )
        self.memory.learn(table)
        self.credits += self.memory.grant()
        buffer = self.credits.pop(0)
        data = os.urandom(table.nbytes)
        arena = self.memory._arenas[buffer]
        arena.reserve(table.nbytes)
        arena.view(table.nbytes)[:] = data
        self.memory.written(
            buffer, mark, rank=self.rank, world=2, facts={"step": mark.step}, table=table.identity, checkpoint=False
        )
        return data

    def close(self) -> None:
        """Stop."""
        self.server.close()
        self.replicator.close()


@pytest.fixture
def place() -> Iterator[Callable[[int], Place]]:
    """Make places that are closed in the end."""
    made: list[Place] = []

    def make(rank: int) -> Place:
        made.append(Place(rank))
        return made[-1]

    yield make
    for one in made:
        one.close()


def eventually(condition: Callable[[], object], seconds: float = 10.0) -> bool:
    """Return whether the condition comes true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return True


def fetch(server: str, rank: int, *, prefetch: bool = True) -> dict[str, bytes]:
    """Fetch a rank's newest snapshot from one server, each tile verified, joined by key."""
    newest = max((i for i in inventories([server], READER) if i.rank == rank), key=lambda i: (i.generation, i.step))
    source = PeerSource(server, READER)
    offers = newest.tiles()
    if prefetch:
        source.prefetch(offers)
    tensors: dict[str, bytes] = {}
    for offer in offers:
        data = source.fetch(offer)
        assert tile_digest(offer.spec, offer.box, data) == offer.digest
        tensors[offer.spec.key] = tensors.get(offer.spec.key, b"") + bytes(data)
    source.close()
    return tensors


def test_a_snapshot_is_fetched_from_home_and_from_the_buddy(place: Callable[[int], Place]) -> None:
    """Both give the same bytes, in tiles, with the facts; the buddy's copy outlives the home's server."""
    home, buddy = place(0), place(1)
    home.begin(1)
    buddy.begin(1)
    home.replicator.set_buddy(buddy.address)
    data = home.write(Mark(1, 7))
    assert eventually(lambda: home.held == [Mark(1, 7)])
    at_home, at_buddy = inventories([home.address, buddy.address], READER)
    assert (at_home.step, at_home.generation, at_home.rank, at_home.world) == (7, 1, 0, 2)
    assert at_home.facts == at_buddy.facts == {"step": 7}
    assert [t.digest for t in at_home.tiles()] == [t.digest for t in at_buddy.tiles()]
    assert len(at_home.tiles()) > 2
    size = SHAPE[0] * SHAPE[1] * 4
    assert fetch(home.address, 0)["model/w"] == data[:size]
    home.close()
    assert fetch(buddy.address, 0, prefetch=False) == {
        "model/w": data[:size],
        "optimizer/w0/step": data[size : size + 4],
    }


def test_without_a_buddy_the_home_copy_is_enough(place: Callable[[int], Place]) -> None:
    """A single node makes progress too."""
    home = place(0)
    home.begin(1)
    home.write(Mark(1, 1))
    assert eventually(lambda: home.held == [Mark(1, 1)])


def test_snapshots_wait_for_another_buddy_when_one_is_gone(place: Callable[[int], Place]) -> None:
    """Nothing hangs, digests are still computed, and the next buddy gets everything."""
    home, dead, other = place(0), place(1), place(1)
    for one in (home, dead, other):
        one.begin(1)
    dead.close()
    home.replicator.set_buddy(dead.address)
    home.write(Mark(1, 1))
    home.write(Mark(1, 2))
    assert eventually(lambda: home.digested == [Mark(1, 1)])
    assert home.held == []
    assert len(inventories([home.address], READER)) == 2
    home.replicator.set_buddy(other.address)
    assert eventually(lambda: home.held == [Mark(1, 1), Mark(1, 2)])
    assert len(inventories([other.address], READER)) == 2


def test_replicas_of_a_stale_generation_are_refused(place: Callable[[int], Place]) -> None:
    """A rank cut off in the past cannot place a snapshot, and does not retry for ever."""
    home, buddy = place(0), place(1)
    home.begin(1)
    buddy.begin(2)
    home.replicator.set_buddy(buddy.address)
    home.write(Mark(1, 1))
    assert eventually(lambda: home.digested)
    time.sleep(0.1)
    assert home.held == []
    assert inventories([buddy.address], READER) == []


def test_snapshots_that_a_buddy_refused_count_at_home_without_one(place: Callable[[int], Place]) -> None:
    """Two that never became safe would keep any other from being taken."""
    home, buddy = place(0), place(1)
    home.begin(1)
    buddy.begin(1)
    buddy.memory.set_generation(2)
    home.replicator.set_buddy(buddy.address)
    home.write(Mark(1, 1))
    home.write(Mark(1, 2))
    assert eventually(lambda: home.digested == [Mark(1, 1), Mark(1, 2)])
    assert home.held == []
    home.replicator.set_buddy(None)
    assert eventually(lambda: home.held == [Mark(1, 1), Mark(1, 2)])


def test_what_a_former_buddy_refuses_counts_at_home(
    place: Callable[[int], Place], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may refuse a snapshot while it is being given up."""
    home, buddy = place(0), place(1)

    class GivesUp:
        def emit(self, name: str, **fields: object) -> None:
            if name == "replica.stale":
                home.replicator.set_buddy(None)

    monkeypatch.setattr(replicate, "process_log", GivesUp)
    home.begin(1)
    buddy.begin(1)
    buddy.memory.set_generation(2)
    home.replicator.set_buddy(buddy.address)
    home.write(Mark(1, 1))
    assert eventually(lambda: home.held == [Mark(1, 1)])


def test_a_byte_changed_at_home_is_detected_by_the_receiver(place: Callable[[int], Place]) -> None:
    """Corruption between hashing and sending is caught by the buddy, between hashing and fetching by the fetcher."""
    home, buddy = place(0), place(1)
    home.begin(1)
    buddy.begin(1)
    home.write(Mark(1, 1))
    assert eventually(lambda: home.held)
    stored = home.memory.find(1, 1, 0)
    assert stored is not None
    stored.data[100] ^= 1
    home.replicator.set_buddy(buddy.address)
    with pytest.raises(AssertionError):
        fetch(home.address, 0)
    time.sleep(0.5)
    assert inventories([buddy.address], READER) == []


def test_the_buddy_drops_what_its_origin_drops(place: Callable[[int], Place]) -> None:
    """Memory does not grow: the buddy follows the votes that the origin received."""
    home, buddy = place(0), place(1)
    home.begin(1)
    buddy.begin(1)
    home.replicator.set_buddy(buddy.address)
    for step in range(1, 12):
        home.write(Mark(1, step))
        assert eventually(lambda step=step: home.held[-1:] == [Mark(1, step)])
        home.memory.safe(Mark(1, step))
    assert {i.step for i in inventories([home.address], READER)} == {11}
    assert {i.step for i in inventories([buddy.address], READER)} <= {10, 11}
    assert len(buddy.memory._other_arenas) <= 3


def test_a_new_generation_keeps_the_snapshot_it_restored(place: Callable[[int], Place]) -> None:
    """At home and at the buddy, until it has a safe step of its own."""
    home, buddy = place(0), place(1)
    home.begin(1)
    buddy.begin(1)
    home.replicator.set_buddy(buddy.address)
    home.write(Mark(1, 1))
    home.write(Mark(1, 2))
    assert eventually(lambda: home.held == [Mark(1, 1), Mark(1, 2)])
    for one in (home, buddy):
        one.begin(2, Mark(1, 1))
        assert [i.step for i in inventories([one.address], READER)] == [1]
    buddy.memory.safe(Mark(2, 1))
    assert inventories([buddy.address], READER) == []


def test_an_inventory_waits_for_digests(place: Callable[[int], Place]) -> None:
    """The final snapshot of a planned change is offered however soon afterwards it is requested."""
    home = place(0)
    home.begin(1)
    for step in range(1, 4):
        home.write(Mark(1, step))
        assert max(i.step for i in inventories([home.address], READER)) == step


def test_servers_of_another_run_do_not_answer(place: Callable[[int], Place]) -> None:
    """A port that another job now has holds nothing for this one."""
    home = place(0)
    home.begin(1)
    home.write(Mark(1, 1))
    assert inventories([home.address], STRANGER) == []
    assert len(inventories([home.address], READER)) == 1


def test_dead_and_silent_servers_do_not_block_an_inventory(
    place: Callable[[int], Place], refusing_port: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One refuses, one accepts and stays silent, one is alive: the answer of the live one comes in time."""
    monkeypatch.setattr(wire, "ANSWER_SECONDS", 0.5)
    home = place(0)
    home.begin(1)
    home.write(Mark(1, 1))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        refused = f"127.0.0.1:{refusing_port()}"
        begun = time.monotonic()
        listed = inventories([f"127.0.0.1:{silent.getsockname()[1]}", refused, home.address], READER)
        assert [i.server for i in listed] == [home.address]
        assert time.monotonic() - begun < 3.0


def test_a_server_that_does_not_answer_at_once_is_asked_again(
    place: Callable[[int], Place], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A packet was lost: what only it holds is not lost."""
    home, tries = place(0), []
    home.begin(1)
    home.write(Mark(1, 1))
    connect = wire.connect

    def lossy(server: str, credentials: Credentials) -> Channel:
        tries.append(server)
        if len(tries) == 1:
            raise WireError(f"{server}: timed out")
        return connect(server, credentials)

    monkeypatch.setattr(wire, "connect", lossy)
    assert [one.step for one in inventories([home.address], READER)] == [1]
    assert tries == [home.address] * 2


def test_a_failed_source_is_not_asked_again(place: Callable[[int], Place], monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand tiles of a dead server fail at once, not one timeout after another."""
    home = place(0)
    home.begin(1)
    home.write(Mark(1, 1))
    (inventory,) = inventories([home.address], READER)
    home.close()
    connect, asked = wire.connect, list[str]()
    monkeypatch.setattr(wire, "connect", lambda *given: (asked.append(given[0]), connect(*given))[1])
    source = PeerSource(home.address, READER)
    source.prefetch(inventory.tiles())
    for offer in inventory.tiles() * 100:
        with pytest.raises(SourceError, match="tile server"):
            source.fetch(offer)
    assert asked == [home.address]


def test_a_released_tile_is_an_error_of_that_tile_alone(place: Callable[[int], Place]) -> None:
    """Others of the same server are still fetched."""
    home = place(0)
    home.begin(1)
    home.write(Mark(1, 1))
    (old,) = inventories([home.address], READER)
    home.write(Mark(1, 2))
    home.memory.safe(Mark(1, 2))
    source = PeerSource(home.address, READER)
    with pytest.raises(SourceError, match="let go of step 1"):
        source.fetch(old.tiles()[0])
    (new,) = inventories([home.address], READER)
    assert len(source.fetch(new.tiles()[0])) == new.tiles()[0].nbytes
    source.close()


def test_garbage_does_not_harm_the_server(place: Callable[[int], Place]) -> None:
    """It refuses any such connection and serves the next."""
    home = place(0)
    home.begin(1)
    home.write(Mark(1, 1))
    with socket.create_connection(wire.parse_address(home.address)) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
    for request in (
        {"op": "fetch", "ranges": [[1, 1, 0, -5, 10]]},
        {"op": "fetch"},
        {"op": "what"},
        {"op": "replicate"},
    ):
        with wire.connect(home.address, READER) as connection:
            connection.send(request)
            answer = connection.receive()
            assert "error" in answer or answer == {"sizes": [-1]}
    assert len(inventories([home.address], READER)) == 1


def test_many_ranks_fetch_at_once(place: Callable[[int], Place]) -> None:
    """A new world restores from one server together."""
    home = place(0)
    home.begin(1)
    data = home.write(Mark(1, 1))
    fetched: list[dict[str, bytes]] = []
    threads = [threading.Thread(target=lambda: fetched.append(fetch(home.address, 0))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(fetched) == 8
    assert all(one["model/w"] == data[: len(one["model/w"])] for one in fetched)


def test_addresses_are_parsed_strictly() -> None:
    """IPv6 in brackets; a malformed address is refused when it is given, not when it is used."""
    assert wire.parse_address("[::1]:80") == ("::1", 80)
    with pytest.raises(ValueError, match="host:port"):
        wire.parse_address("nowhere")
    assert client.inventories([], READER) == []


def test_a_bad_copy_at_home_is_replaced_by_the_buddys(place: Callable[[int], Place]) -> None:
    """The resolver verifies each tile and falls through to the other copy of just that tile."""
    home, buddy = place(0), place(1)
    home.begin(1)
    buddy.begin(1)
    home.replicator.set_buddy(buddy.address)
    data = home.write(Mark(1, 1))
    assert eventually(lambda: home.held)
    stored = home.memory.find(1, 1, 0)
    assert stored is not None
    stored.data[100] ^= 1
    listed = inventories([home.address, buddy.address], READER)
    sources = {server: PeerSource(server, READER) for server in (home.address, buddy.address)}
    wanted = [(entry.spec, entry.box) for entry in stored.table.entries]
    filled = {spec.key: bytearray(box.numel * spec.itemsize) for spec, box in wanted}
    resolved = resolve(
        wanted,
        [offer for one in listed for offer in one.tiles()],
        sources,
        lambda spec, _: memoryview(filled[spec.key]),
    )
    for source in sources.values():
        source.close()
    assert filled["model/w"] == data[: len(filled["model/w"])]
    assert [failure.source for failure in resolved.failures] == [home.address]
    assert resolved.sources[buddy.address].tiles == 1
    assert resolved.sources[home.address].tiles >= 1


# Strangers.


def request(mark: Mark, origin: int, layout: tables.SnapshotTable, **changes: object) -> dict[str, object]:
    """Return an offer of a snapshot of rank `origin`."""
    offer: dict[str, object] = {
        "op": "replicate",
        "generation": mark.generation,
        "step": mark.step,
        "rank": origin,
        "world": 2,
        "facts": {"step": mark.step},
        "keep": [],
        "base": None,
        "identity": layout.identity,
        "table": tables.to_wire(layout),
    }
    return offer | changes


def test_nobody_reads_or_writes_without_the_secret(place: Callable[[int], Place]) -> None:
    """Neither an inventory nor a tile nor a forged snapshot of a high step. It is reported, once for a flood."""
    home = place(0)
    home.begin(1)
    home.write(Mark(1, 1))
    for _ in range(3):
        with pytest.raises(wire.WireError, match="does not hold this run's secret"):
            wire.connect(home.address, STRANGER)
        with socket.create_connection(wire.parse_address(home.address)) as stranger:
            stranger.settimeout(20)
            stranger.sendall(b'\x00\x00\x00\x12{"op":"inventory"}')
            with contextlib.suppress(ConnectionError):
                assert stranger.recv(1) == b""
    assert eventually(lambda: home.refused)
    assert len(home.refused) == 1
    assert (home.refused[0].port, home.refused[0].peer) == ("tiles", "127.0.0.1")
    assert [i.step for i in inventories([home.address], READER)] == [1]


def test_a_node_serves_nobody_before_it_has_joined() -> None:
    """Without a secret it cannot tell who belongs to the run."""
    refused: list[Refusal] = []
    memory = SnapshotMemory()
    server = TileServer(memory, host="127.0.0.1", refused=refused.append)
    try:
        with pytest.raises(wire.WireError):
            wire.connect(f"127.0.0.1:{server.port}", READER)
        assert eventually(lambda: refused)
    finally:
        server.close()
        memory.close()


def test_a_member_cannot_forge_or_drop_the_replica_of_another(place: Callable[[int], Place]) -> None:
    """A rank's snapshots come from the node that the sealed record names, and from no other member."""
    home, buddy = place(0), place(1)
    home.begin(3)
    buddy.begin(3)
    home.replicator.set_buddy(buddy.address)
    home.write(Mark(3, 4))
    assert eventually(lambda: home.held)
    table = tables.lay_out([(TensorSpec(key="model/w", dtype="float32", shape=(4,)), Box(start=(0,), stop=(4,)))])
    for changes, word in (({}, "denied"), ({"rank": 7}, "denied"), ({"generation": 9}, "error")):
        with wire.connect(buddy.address, READER) as liar:
            liar.send(request(Mark(3, 99), 0, table, **changes))
            assert word in liar.receive()
    assert [(i.rank, i.step) for i in inventories([buddy.address], READER)] == [(0, 4)]
    assert eventually(lambda: any("rank 0 of generation 3 is 0@1, not 9@1" in one.reason for one in buddy.refused))


def test_replicas_are_bounded_by_their_memory(place: Callable[[int], Place]) -> None:
    """Announcements take no memory, and a replica that would take too much is refused before it is sent."""
    buddy = place(1)
    buddy.begin(1)
    rows = REPLICA_BYTES // 4 + 1
    table = tables.lay_out([(TensorSpec(key="model/w", dtype="float32", shape=(rows,)), Box(start=(0,), stop=(rows,)))])
    with wire.connect(buddy.address, Credentials(secret=SECRET, id="0@1")) as home:
        home.send(request(Mark(1, 1), 0, table))
        assert "for replicas" in home.receive()["error"]
        small = tables.lay_out([(TensorSpec(key="model/b", dtype="uint8", shape=(4,)), Box(start=(0,), stop=(4,)))])
        home.send(request(Mark(1, 2), 0, small))
        assert home.receive() == {"ok": True}


def test_a_replica_may_replace_the_last_one_of_an_old_table() -> None:
    """Its own table is not forgotten with what it replaces, however many came since."""
    memory = SnapshotMemory()
    box = Box(start=(0,), stop=(4,))
    layouts = [tables.lay_out([(TensorSpec(key=f"w{i}", dtype="uint8", shape=(4,)), box)]) for i in range(9)]
    memory.learn(layouts[0])
    about = {"rank": 0, "world": 1, "facts": {}, "table": layouts[0].identity, "base": None}
    first = memory.arriving(Mark(1, 1), keep=[1], **about)  # type: ignore[arg-type]
    assert first is not None
    assert memory.arrived(first)
    for layout in layouts[1:]:
        memory.learn(layout)
    second = memory.arriving(Mark(2, 2), keep=[2], **about)  # type: ignore[arg-type]
    assert second is not None
    assert memory.arrived(second)
    memory.close()


def test_a_replica_that_cannot_be_mapped_leaves_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often that fails, none of them counts as arriving."""
    memory = SnapshotMemory()
    table = tables.lay_out([(TensorSpec(key="w", dtype="uint8", shape=(4,)), Box(start=(0,), stop=(4,)))])
    memory.learn(table)
    about = {"rank": 0, "world": 1, "facts": {}, "table": table.identity, "keep": [1], "base": None}
    with monkeypatch.context() as short:
        short.setattr("mmap.mmap", fail)
        for _ in range(REPLICAS):
            with pytest.raises(OSError, match="no memory"):
                memory.arriving(Mark(1, 1), **about)  # type: ignore[arg-type]
    assert memory.arriving(Mark(1, 1), **about) is not None  # type: ignore[arg-type]
    memory.close()


def fail(*_: object) -> None:
    """Stand in for a call that the system refuses."""
    raise OSError("no memory")


def test_a_table_under_another_identity_is_refused(place: Callable[[int], Place]) -> None:
    """Otherwise snapshots of others that name this identity would be read with the wrong tensors."""
    buddy = place(1)
    buddy.begin(1)
    spec = TensorSpec(key="model/w", dtype="float32", shape=(4,))
    table = tables.lay_out([(spec, Box(start=(0,), stop=(4,)))])
    other = tables.lay_out([(spec, Box(start=(0,), stop=(2,)))])
    forged = {**tables.to_wire(table), "identity": other.identity}
    with wire.connect(buddy.address, Credentials(secret=SECRET, id="0@1")) as home:
        home.send(request(Mark(1, 1), 0, table, identity=other.identity, table=forged))
        assert "another identity" in home.receive()["error"]


def test_silent_connections_are_closed(place: Callable[[int], Place]) -> None:
    """A hundred unauthenticated connections do not keep a member out, and each is closed at its deadline."""
    home = place(0)
    home.begin(1)
    home.write(Mark(1, 1))
    crowd = [socket.create_connection(wire.parse_address(home.address), timeout=30) for _ in range(100)]
    try:
        assert [i.step for i in inventories([home.address], READER)] == [1]
        for one in crowd:
            with contextlib.suppress(ConnectionError):
                assert one.recv(1) == b""
    finally:
        for one in crowd:
            one.close()


def test_oversized_announcements_and_nested_json_do_no_harm(place: Callable[[int], Place]) -> None:
    """Even from members: memory grows with received bytes, and deep JSON is an error like any other."""
    home = place(0)
    home.begin(1)
    home.write(Mark(1, 1))
    before = resident()
    announcing = [wire.connect(home.address, READER) for _ in range(4)]
    for one in announcing:
        one.send_bytes((1 << 30).to_bytes(4, "big"))
    with wire.connect(home.address, READER) as nested:
        nested.send_sealed(b"[" * 100_000)
        with pytest.raises(wire.WireError):
            nested.receive()
    assert resident() - before < 256 << 20
    for one in announcing:
        one.close()
    assert len(inventories([home.address], READER)) == 1


def resident() -> int:
    """Return the resident memory of this process, in bytes."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_changed_frame_ends_the_connection(place: Callable[[int], Place]) -> None:
    """A man in the middle who lets the handshake pass cannot alter what follows."""
    home = place(0)
    home.begin(1)
    with wire.connect(home.address, READER) as one:
        body = b'{"op":"inventory"}'
        one.send_bytes(len(body).to_bytes(4, "big") + body + bytes(16))
        with pytest.raises(wire.WireError):
            one.receive()


def test_with_a_certificate_snapshots_are_sent_encrypted(place: Callable[[int], Place], tmp_path: Path) -> None:
    """Replicas and fetched tiles. A peer that has the secret but does not encrypt is disconnected."""
    made = Certificates.make(tmp_path)
    home, buddy = place(0), place(1)
    for one in (home, buddy):
        encrypting = replace(one.credentials, certificate=str(made.client), key=str(made.client_key))
        one.server.set_credentials(encrypting)
        one.replicator.set_credentials(encrypting)
        one.begin(1)
    home.replicator.set_buddy(buddy.address)
    home.write(Mark(1, 1))
    assert eventually(lambda: home.held, 30)
    reader = replace(READER, certificate=str(made.client), key=str(made.client_key))
    (inventory,) = inventories([buddy.address], reader)
    source = PeerSource(buddy.address, reader)
    for offer in inventory.tiles():
        assert tile_digest(offer.spec, offer.box, source.fetch(offer)) == offer.digest
    source.close()
    assert inventories([buddy.address], READER) == []
    assert eventually(lambda: any("does not encrypt as this node does" in one.reason for one in buddy.refused))

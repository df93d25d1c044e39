"""A node's own snapshots are read where they lie, not fetched: over real sockets and real shared memory."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from checkpointing.format.tiles import Box, TensorSpec
from checkpointing.reading.resolver import Resolved, resolve
from elastic3d.port import NearMemory
from elastic3d.snapshots.client import inventories, merged
from elastic3d.snapshots.holdings import Mark
from elastic3d.snapshots.lending import BorrowedMemory, Lender, borrow
from elastic3d.snapshots.memory import SnapshotName
from elastic3d.training import loading, restoring
from elastic3d.training.tiers import KeepersAndStore
from elastic3d.trust import local
from tests.logs import recorded
from tests.snapshots.test_serving import READER, SHAPE, Place, eventually

SIZE = SHAPE[0] * SHAPE[1] * 4
SPEC = TensorSpec(key="model/w", dtype="float32", shape=(SHAPE[0] * 2, SHAPE[1]))
ALIGNED = Box(start=(0, 0), stop=SHAPE)
CROSSWISE = Box(start=(0, 3), stop=(SHAPE[0], 70))
"""What no tile lies contiguous in: another layout's part of the tensor."""


class Lending(Place):
    """A slot whose memory is lent too."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.returned = threading.Semaphore(0)
        self.lender = Lender(self.memory, returned=self.returned.release)
        self.near = NearMemory(server=self.address, lender=self.lender.name)

    def close(self) -> None:
        """Stop."""
        super().close()
        self.lender.close()


@pytest.fixture
def place() -> Iterator[Callable[[int], Lending]]:
    """Make slots that are closed in the end."""
    made: list[Lending] = []

    def make(rank: int) -> Lending:
        made.append(Lending(rank))
        made[-1].begin(1)
        return made[-1]

    yield make
    for one in made:
        one.close()


def decided(*places: Place, step: int = 7) -> restoring.Decision:
    """Return the decision to go on from a step, as each rank gets it."""
    held = [one for one in merged(inventories([place.address for place in places], READER)) if one.step == step]
    offers = tuple(offer for one in held for offer in one.offers())
    decision = restoring.Decision(source=restoring.MEMORY, step=step, generation=1, offers=offers)
    return restoring.load(restoring.dump(decision))


def read(decision: restoring.Decision, *near: NearMemory, box: Box = ALIGNED) -> tuple[bytes, Resolved]:
    """Return a part of the tensor as a trainer of that node gets it, and where from."""
    sources = KeepersAndStore(READER).sources(decision, None, 0, near)
    buffer = bytearray(box.numel * 4)
    wanted = [(SPEC, box)]
    offers = restoring.offers(decision, sources, wanted)
    resolved = resolve(wanted, offers, sources, lambda spec, box: memoryview(buffer))
    loading.tell_read(resolved, sources)
    restoring.close_sources(sources)
    return bytes(buffer), resolved


def columns(data: bytes) -> bytes:
    """Return the bytes of CROSSWISE out of the tensor's half."""
    row = SHAPE[1] * 4
    return b"".join(data[at + 12 : at + 280] for at in range(0, SIZE, row))


@pytest.mark.parametrize("box", [ALIGNED, CROSSWISE])
def test_no_byte_of_ones_own_state_goes_through_tcp(place: Callable[[int], Lending], box: Box) -> None:
    """With every tile server gone, a trainer has its state from its node's memory: of its slot and of another."""
    first, second = place(0), place(1)
    data = {one.rank: one.write(Mark(1, 7)) for one in (first, second)}
    decision = decided(first, second)
    for one in (first, second):
        one.server.close()
    got, resolved = read(decision, first.near, second.near, box=box)
    assert got == (data[0][:SIZE] if box == ALIGNED else columns(data[0]))
    assert resolved.failures == ()
    assert resolved.sources[first.address].bytes == SIZE
    low = Box(start=(SHAPE[0], 0), stop=(SHAPE[0] * 2, SHAPE[1]))
    assert read(decision, first.near, second.near, box=low)[0] == data[1][:SIZE]


def test_a_replica_is_lent_like_a_snapshot_of_ones_own(place: Callable[[int], Lending]) -> None:
    """After a node's death its state lies at its buddy, whose own trainer reads it there."""
    home, buddy = place(0), place(1)
    home.replicator.set_buddy(buddy.address)
    data = home.write(Mark(1, 7))
    assert eventually(lambda: home.held, 60.0)
    home.close()
    decision = decided(buddy)
    buddy.server.close()
    assert read(decision, buddy.near)[0] == data[:SIZE]


@pytest.mark.parametrize("lender", ["home", "buddy"])
def test_what_is_lent_is_not_overwritten_while_it_is_read(place: Callable[[int], Lending], lender: str) -> None:
    """However many snapshots follow; given back, the memory serves again."""
    home, buddy = place(0), place(1)
    home.replicator.set_buddy(buddy.address)
    data = home.write(Mark(1, 7))
    assert eventually(lambda: home.held, 60.0)
    one = home if lender == "home" else buddy
    decision = decided(one)
    name = SnapshotName(1, 7, 0)
    borrowed = borrow(one.address, one.lender.name, [name])
    train(home, range(8, 16))
    tiles = [tile for offer in decision.offers for tile in offer.tiles() if tile.spec.key == "model/w"]
    assert b"".join(bytes(borrowed.fetch(tile)) for tile in tiles) == data[:SIZE]
    borrowed.close()
    assert one.returned.acquire(timeout=30)
    assert home.memory.find(*name) is None
    segments = len(buddy.memory._other_arenas)
    train(home, range(16, 24))
    assert buddy.memory.find(*name) is None
    assert len(buddy.memory._other_arenas) == segments


def train(home: Place, steps: range) -> None:
    """Take these snapshots, each safe before the next."""
    for step in steps:
        home.write(Mark(1, step))
        assert eventually(lambda step=step: home.held[-1] == Mark(1, step), 60.0)
        home.memory.safe(Mark(1, step))


def test_a_flipped_byte_is_found_and_mended_from_the_buddy(place: Callable[[int], Lending]) -> None:
    """The trainer gets good bytes, an event names the tensor, and the next one to read finds the memory whole."""
    home, buddy = place(0), place(1)
    home.replicator.set_buddy(buddy.address)
    data = home.write(Mark(1, 7))
    assert eventually(lambda: home.held, 60.0)
    decision = decided(home, buddy)
    stored = home.memory.find(1, 7, 0)
    assert stored is not None
    stored.data[100] ^= 1
    with recorded() as entries:
        got, resolved = read(decision, home.near)
    assert got == data[:SIZE]
    assert resolved.repaired == 1
    assert resolved.sources[buddy.address].tiles == 1
    assert resolved.sources[home.address].bytes + resolved.sources[buddy.address].bytes == SIZE
    (damaged,) = [entry for entry in entries if entry["event"] == "copy.damaged"]
    assert (damaged["source"], damaged["tensor"], damaged["more"]) == (home.address, "model/w", 0)
    assert bytes(stored.data[:SIZE]) == data[:SIZE]
    assert read(decision, home.near)[1].failures == ()


def test_without_its_lender_a_node_asks_its_server(place: Callable[[int], Lending]) -> None:
    """Slower, and said."""
    home = place(0)
    data = home.write(Mark(1, 7))
    decision = decided(home)
    home.lender.close()
    assert eventually(lambda: _gone(home.lender.name), 60.0)
    with recorded() as entries:
        got, _ = read(decision, home.near)
    assert got == data[:SIZE]
    assert [entry["server"] for entry in entries if entry["event"] == "memory.unlent"] == [home.address]


def test_what_a_lender_does_not_have_comes_from_elsewhere(place: Callable[[int], Lending]) -> None:
    """It let go of the snapshot after the decision: its buddy still has it."""
    home, buddy = place(0), place(1)
    home.replicator.set_buddy(buddy.address)
    data = home.write(Mark(1, 7))
    assert eventually(lambda: home.held, 60.0)
    decision = decided(home, buddy)
    home.memory.restored(2, None)
    got, resolved = read(decision, home.near)
    assert got == data[:SIZE]
    assert resolved.sources[buddy.address].bytes == SIZE


def _gone(name: str) -> bool:
    try:
        local.connect(name, 5.0).close()
    except OSError:
        return True
    return False


def test_a_lender_survives_callers_that_are_no_borrowers(place: Callable[[int], Lending]) -> None:
    """Garbage, a silent hang-up and another user's process get nothing, and the next borrower is served."""
    home = place(0)
    data = home.write(Mark(1, 7))
    before = len(os.listdir("/proc/self/fd"))
    for said in (b"", b"\x02\x00\x00\x00{}", b"\xff" * 64, b'\x13\x00\x00\x00{"borrow": [[1,2]]}'):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
            stranger.connect("\0" + home.lender.name)
            stranger.sendall(said)
            stranger.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionResetError):
                assert stranger.recv(1) == b""
    borrowed = borrow(home.address, home.lender.name, [SnapshotName(1, 7, 0), SnapshotName(1, 8, 0)])
    assert isinstance(borrowed, BorrowedMemory)
    assert bytes(borrowed._lent[SnapshotName(1, 7, 0)][:SIZE]) == data[:SIZE]
    borrowed.close()
    assert len(os.listdir("/proc/self/fd")) < before + 100

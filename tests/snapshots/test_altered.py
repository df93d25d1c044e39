"""Snapshots whose bits change in memory between their writing and their becoming safe."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest

from checkpointing.format.tiles import digest
from elastic3d.snapshots import client, memory
from elastic3d.snapshots.holdings import Mark
from elastic3d.snapshots.memory import SnapshotMemory
from elastic3d.snapshots.replicate import Replicator
from tests.snapshots.test_serving import READER, Place, eventually


class Altering(Place):
    """A place whose trainer says what it has written, and where a bit changes right after that where `alters` says."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.alters: Callable[[Mark], bool] = lambda mark: True
        self.says = True
        self.found: list[tuple[Mark, str, bool]] = []
        self.replicator.close()
        self.memory = SnapshotMemory()
        self.server._memory = self.memory
        self.replicator = Replicator(
            self.memory,
            digested=self.digested.append,
            altered=lambda *found: self.found.append(found),
            ended=lambda mark, newer, *_: newer and self.held.append(mark),
        )
        self.replicator.set_credentials(self.credentials)
        written = self.memory.written

        def write(buffer: int, mark: Mark, **about: object) -> None:
            table = self.memory._tables[str(about["table"])]
            view = self.memory._arenas[buffer].view(table.nbytes)
            said: Sequence[str] = memory.digests(table, view, 0, len(table.tiles)) if self.says else ()
            if self.alters(mark):
                view[5] ^= 1
            written(buffer, mark, **about, digests=said)  # type: ignore[arg-type]

        self.memory.written = write  # type: ignore[method-assign, assignment]


@pytest.fixture
def home() -> Iterator[Altering]:
    made = Altering(0)
    made.begin(1)
    yield made
    made.close()


@pytest.fixture
def buddy() -> Iterator[Place]:
    made = Place(1)
    made.begin(1)
    yield made
    made.close()


@pytest.mark.parametrize("with_buddy", [True, False], ids=["with a buddy", "alone"])
def test_a_snapshot_that_changed_after_it_was_written_is_never_safe(
    home: Altering, buddy: Place, with_buddy: bool
) -> None:
    """Nor is a newer one: others may hold no newer one than this, which would count as held here then, too.

    The next generation begins anew.
    """
    if with_buddy:
        home.replicator.set_buddy(buddy.address)
    home.alters = lambda mark: mark == Mark(1, 2)
    home.write(Mark(1, 1))
    assert eventually(lambda: home.held == [Mark(1, 1)])
    home.memory.safe(Mark(1, 1))
    home.write(Mark(1, 2))
    home.write(Mark(1, 3))
    assert eventually(lambda: home.found == [(Mark(1, 2), "model/w", True)])
    assert home.memory.wait_for_work(0.3) is None
    assert home.held == [Mark(1, 1)]
    home.begin(2, Mark(1, 1))
    buddy.begin(2)
    home.write(Mark(2, 2))
    assert eventually(lambda: home.held[-1] == Mark(2, 2))
    assert len(home.found) == 1


def test_a_safe_snapshot_that_changed_costs_no_trainer(home: Altering, buddy: Place) -> None:
    """A new buddy does not take it; what is newer is replicated as ever."""
    home.alters = lambda mark: False
    home.write(Mark(1, 1))
    assert eventually(lambda: home.held == [Mark(1, 1)])
    home.memory.safe(Mark(1, 1))
    stored = home.memory.find(1, 1, 0)
    assert stored is not None
    stored.data[5] ^= 1
    home.replicator.set_buddy(buddy.address)
    assert eventually(lambda: home.found == [(Mark(1, 1), "model/w", False)])
    home.write(Mark(1, 2))
    assert eventually(lambda: home.held == [Mark(1, 1), Mark(1, 2)])


@pytest.mark.parametrize("says", [True, False], ids=["by the trainer", "by the keeper"])
def test_whose_digest_shows_what_changed_before_the_keeper_looked(home: Altering, says: bool) -> None:
    """The keeper takes a digest of what it finds: bits that changed before that have it. Those that the trainer hashed
    do not."""
    home.says = says
    home.write(Mark(1, 1))
    assert eventually(lambda: home.digested == [Mark(1, 1)])
    (held,) = client.inventories([home.address], READER)
    source = client.PeerSource(home.address, READER)
    wrong = [tile for tile in held.tiles() if digest(tile.spec, tile.box, source.fetch(tile)) != tile.digest]
    source.close()
    assert bool(wrong) == says

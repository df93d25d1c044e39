"""Bits that change in memory while a save reads it: what is committed has its digest, or is not committed."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from checkpointing import Box, Checkpoint, Piece, SaveOptions, Store, TensorSpec, open_store
from checkpointing.errors import Corrupt, StoreError
from checkpointing.format.grid import cut
from checkpointing.format.tiles import digest
from checkpointing.saving import bases
from checkpointing.saving.save import save_rank
from checkpointing.stores.keys import Key
from checkpointing.stores.passing import PassingStore
from checkpointing.stores.protocol import Data, chunks
from checkpointing.stores.retrying import RetryingStore
from tests.checkpointing.saving.test_saving import by_hand, committed, training
from tests.checkpointing.states import FACTS, State, piece

_numbers = itertools.count()

KINDS = ("directory", "memory", "encrypted")


class Watched(PassingStore):
    """A store with calls right before and after a pack is sent."""

    def __init__(self, behind: Store) -> None:
        super().__init__(behind)
        self.before: Callable[[], None] = lambda: None
        self.after: Callable[[], None] = lambda: None

    def put(self, name: str, data: Data, *, check: bool = False) -> None:
        self.before()
        try:
            super().put(name, data, check=check)
        finally:
            self.after()


@pytest.fixture(params=KINDS)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Watched:
    """Return a store of each way in which pieces are taken."""
    match request.param:
        case "directory":
            return Watched(open_store(str(tmp_path)))
        case "encrypted":
            return Watched(open_store(str(tmp_path), key=Key(bytes(range(32)))))
        case _:
            return Watched(open_store(f"memory://changing-{next(_numbers)}"))


def tiles_of(state: State, *, digests: bool) -> list[Piece]:
    """Cut a state into tiles of 1 KiB in memory that can be written to."""
    return [
        Piece(spec=t.spec, box=t.box, data=t.data, digest=digest(t.spec, t.box, t.data) if digests else "")
        for spec, data in state.items()
        for t in cut(piece(spec, data, spec.box), 1024)
    ]


def flip(tile: Piece) -> None:
    """Change a bit of a tile."""
    tile.data[tile.data.nbytes // 2] ^= 1


def save(
    store: Store,
    tiles: list[Piece],
    codec: str = "raw",
    *,
    step: int = 1,
    parent: Checkpoint | None = None,
    **more: Any,
) -> None:
    """Save tiles as the one rank, a pack at a time."""
    options = SaveOptions(codec=codec, tile_bytes=1024, pack_bytes=4096, transfers=1)
    save_rank(
        store, step=step, made_in=1, attempt=0, rank=0, world=1, pieces=tiles, facts=FACTS, parent=parent,
        options=options, **more,
    )  # fmt: skip


@pytest.mark.parametrize("digests", [True, False], ids=["with digests", "without"])
@pytest.mark.parametrize("codec", ["raw", "planes"])
def test_a_tile_that_changes_after_it_was_compared_is_in_no_checkpoint(
    store: Watched, codec: str, digests: bool
) -> None:
    """All were compared with their digests when the first pack is sent; the last one changes then, and is not sent."""
    tiles = tiles_of(training(0), digests=digests)
    last = sorted(tiles, key=lambda tile: (tile.spec.key, tile.box.start))[-1]
    sent = itertools.count()
    store.before = lambda: flip(last) if not next(sent) else None
    with pytest.raises(Corrupt, match=rf"{last.spec.key} .* changed in memory"):
        save(store, tiles, codec)
    assert not list(store.list("saves/"))
    store.before = lambda: None
    save(store, tiles_of(training(1), digests=digests), codec, step=2)
    assert by_hand(committed(store, 2)) == training(1)


def test_a_tile_that_changes_for_a_moment_while_it_is_sent_is_in_no_checkpoint(store: Watched) -> None:
    """It had its digest before, and has it again afterwards; what was sent in between had not."""
    tiles = tiles_of(training(0), digests=True)
    last = tiles[-2]
    store.before = store.after = lambda: flip(last)
    with pytest.raises(Corrupt, match="changed in memory"):
        save(store, tiles)
    assert not list(store.list("saves/"))


def test_a_pack_whose_tile_changes_between_two_tries_is_not_written(store: Watched) -> None:
    """The second try reads the memory again, and looks at what it reads."""
    tiles = tiles_of(training(0), digests=True)

    class Refusing(PassingStore):
        refused = 0

        def put(self, name: str, data: Data, *, check: bool = False) -> None:
            if not self.refused:
                self.refused += 1
                for chunk in chunks(data):
                    assert chunk.nbytes
                flip(tiles[0])
                raise StoreError("busy")
            super().put(name, data, check=check)

    tiles.sort(key=lambda tile: (tile.spec.key, tile.box.start))
    with pytest.raises(Corrupt, match="changed in memory"):
        save(RetryingStore(Refusing(store), patience=30.0, sleep=lambda seconds: None), tiles)
    assert not list(store.list("packs/"))


def test_a_piece_that_was_taken_changes_no_more() -> None:
    """A store may hold pieces until all are there: they are no memory that anybody else writes to."""
    tiles = tiles_of(training(0), digests=True)

    class Holding(PassingStore):
        def put(self, name: str, data: Data, *, check: bool = False) -> None:
            held = list(chunks(data))
            for tile in tiles:
                flip(tile)
            super().put(name, b"".join(held), check=check)
            for tile in tiles:
                flip(tile)

    store = Holding(open_store(f"memory://changing-{next(_numbers)}"))
    save(store, tiles)
    assert by_hand(committed(store)) == training(0)


def test_a_difference_is_made_of_bytes_that_have_their_digest() -> None:
    """A tile changes while its older one is read: what was compared is what is encoded."""
    store = open_store(f"memory://changing-{next(_numbers)}")
    save(store, tiles_of(training(0), digests=True), "xor")
    parent = committed(store)
    tiles = tiles_of(training(1), digests=True)

    def recall(spec: TensorSpec, box: Box) -> None:
        flip(next(tile for tile in tiles if (tile.spec, tile.box) == (spec, box)))

    save(store, tiles, "xor", step=2, parent=parent, recall=recall)
    checkpoint = committed(store, 2)
    assert any(tile.base for tile in checkpoint.tiles)
    assert by_hand(checkpoint) == training(1)


def test_an_older_tile_from_memory_is_used_as_it_was_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """It changes when its digest has been taken; the difference is to what had that digest."""
    store = open_store(f"memory://changing-{next(_numbers)}")
    save(store, tiles_of(training(0), digests=True), "xor")
    parent = committed(store)
    older = {(tile.spec, tile.box): tile for tile in tiles_of(training(0), digests=True)}

    def digest_and_change(spec: TensorSpec, box: Box, data: memoryview) -> str:
        said = digest(spec, box, data)
        flip(older[spec, box])
        return said

    monkeypatch.setattr(bases, "digest", digest_and_change)
    save(
        store, tiles_of(training(1), digests=True), "xor", step=2, parent=parent,
        recall=lambda spec, box: older[spec, box].data,
    )  # fmt: skip
    checkpoint = committed(store, 2)
    assert any(tile.base for tile in checkpoint.tiles)
    assert by_hand(checkpoint) == training(1)

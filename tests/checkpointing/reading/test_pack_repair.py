"""Damaged packs are repaired on request, and only once all of a pack is right again."""

from __future__ import annotations

import itertools
from random import Random

import pytest

from checkpointing import Checkpoint, Key, Offered, Resolved, Store, open_checkpoint, open_store, resolve, verify
from checkpointing.errors import MissingTile
from checkpointing.format import names
from checkpointing.format.codecs import Codec
from checkpointing.format.tiles import Box, TensorSpec
from checkpointing.reading.spares import Spares
from checkpointing.stores.encrypted import CHUNK, EncryptedStore
from tests.checkpointing.encoded import save_encoded, smooth
from tests.checkpointing.states import SMALL, make_state, save_and_commit

_numbers = itertools.count()
SHAPES = {"a": ("float32", (40, 8)), "b": ("bfloat16", (300,)), "c": ("int64", (6, 40))}


def fresh() -> Store:
    return open_store(f"memory://mending-{next(_numbers)}")


class Held:
    """Tiles of a checkpoint held in memory, as a tier would."""

    name = "held"

    def __init__(self, checkpoint: Checkpoint) -> None:
        source = checkpoint.source()
        self.tiles = {offer.digest: bytes(source.fetch(offer)) for offer in checkpoint.offers()}

    def fetch(self, tile: Offered) -> bytes:
        return self.tiles[tile.digest]


def flip(store: Store, name: str, *places: int) -> None:
    data = bytearray(store.get(name))
    for place in places:
        data[place] ^= 1
    store.put(name, bytes(data))


def restore(checkpoint: Checkpoint, held: Held | None, *, repair: bool, boxes: list[Box] | None = None) -> Resolved:
    wanted = [(s, box) for s in checkpoint.specs.values() for box in (boxes or [s.box])]
    offers = list(checkpoint.offers())
    sources = {"store": checkpoint.source(repair=repair), **({"held": held} if held else {})}
    if held is not None:
        offers += [Offered(spec=o.spec, box=o.box, digest=o.digest, source="held", where=None) for o in offers]
    kept = {(s, box): bytearray(box.numel * s.itemsize) for s, box in wanted}
    return resolve(wanted, offers, sources, lambda s, box: memoryview(kept[s, box]))


def test_a_restore_repairs_only_with_permission() -> None:
    """A damaged pack is repaired by a restore that may, and left alone by one that may not."""
    store = fresh()
    save_and_commit(store, make_state(SMALL))
    checkpoint = open_checkpoint(store)
    held = Held(checkpoint)
    tile = next(tile for tile in checkpoint.tiles if tile.spec.key == "model/w")
    flip(store, names.pack(tile.pack), tile.offset)
    assert restore(checkpoint, held, repair=False).repaired == 0
    assert len(list(verify(store))) == 1
    resolved = restore(checkpoint, held, repair=True)
    assert (resolved.repaired, resolved.unrepaired) == (1, ())
    assert list(verify(store)) == []


def test_a_pack_is_written_once_all_of_it_is_whole() -> None:
    """Several bad tiles of one pack are replaced together.

    A tile that the restore cannot know stays, and is reported.
    """
    store = fresh()
    save_and_commit(store, make_state(SMALL))
    checkpoint = open_checkpoint(store)
    held = Held(checkpoint)
    (pack, *_) = checkpoint.packs
    tiles = [tile for tile in checkpoint.tiles if tile.pack == pack]
    flip(store, names.pack(pack), *(tile.offset for tile in tiles))
    resolved = restore(checkpoint, held, repair=True)
    assert resolved.repaired >= 1
    assert all("more tiles of it are damaged" in failure.reason for failure in resolved.unrepaired)
    assert list(verify(store)) == []
    flip(store, names.pack(pack), tiles[0].offset, store.size(names.pack(pack)) - 1)
    resolved = restore(checkpoint, held, repair=True)
    assert resolved.repaired == 0
    assert all("cannot be mended" in failure.reason for failure in resolved.unrepaired)


@pytest.mark.parametrize("which", ["tile", "base"])
def test_encoded_tiles_and_bases_are_repaired(which: str) -> None:
    """If the base is damaged, the good bytes of a difference restore it."""
    store = fresh()
    first, second = smooth(SHAPES), smooth(SHAPES, 1)
    bases = save_encoded(store, first, lambda spec: Codec.RAW if spec.key == "b" else Codec.PLANES)
    save_encoded(store, second, lambda _: Codec.XOR_PLANES, step=2, bases=bases, older=first)
    checkpoint = open_checkpoint(store)
    held = Held(checkpoint)
    for tile in checkpoint.tiles:
        if tile.base is None:
            continue
        place = tile if which == "tile" else tile.base
        flip(store, names.pack(place.pack), place.offset + place.length // 2)
        with pytest.raises(MissingTile):
            restore(checkpoint, None, repair=True)
        assert restore(checkpoint, held, repair=True).repaired == 1
        assert list(verify(store)) == []


@pytest.mark.parametrize("which", ["tile", "base"])
def test_packs_of_encrypted_stores_are_repaired(which: str) -> None:
    """Damage takes a chunk, with whatever lies in it, be it the pack's head; only the index must be left."""
    inner, random = fresh(), Random(7)
    store = EncryptedStore(inner, Key.generate())
    spec = TensorSpec(key="w", dtype="bfloat16", shape=(200_000,))
    # Four bits of each byte: what is encoded is shorter, and still takes several chunks.
    first, second = ({spec: bytes(random.choices(range(16), k=400_000))} for _ in range(2))
    bases = save_encoded(store, first, lambda _: Codec.PLANES, cuts=())
    (base,) = (entry.name for entry in inner.entries(names.PACKS))
    save_encoded(store, second, lambda _: Codec.XOR_PLANES, step=2, bases=bases, older=first, cuts=())
    (tile,) = (entry.name for entry in inner.entries(names.PACKS) if entry.name != base)
    checkpoint = open_checkpoint(store)
    held = Held(checkpoint)
    damaged = base if which == "base" else tile
    chunks = -(-inner.size(damaged) // CHUNK)
    assert chunks > 2
    for chunk in range(chunks - 1):
        flip(inner, damaged, chunk * CHUNK + 100)
        assert list(verify(store))
        with pytest.raises(MissingTile):
            restore(checkpoint, None, repair=True)
        assert restore(checkpoint, held, repair=True).repaired == 1
        assert list(verify(store)) == []
    flip(inner, damaged, inner.size(damaged) - 100)
    (failure, *_) = restore(checkpoint, held, repair=True).unrepaired
    assert "cannot be mended" in failure.reason


def test_an_equal_tile_of_another_checkpoint_is_a_spare_copy() -> None:
    """Two full saves of one state are two copies, which the source of spares finds by digest."""
    store = fresh()
    save_and_commit(store, make_state(SMALL), step=1)
    save_and_commit(store, make_state(SMALL), step=2, world=3)
    checkpoint = open_checkpoint(store)
    for pack in checkpoint.packs:
        store.delete(names.pack(pack))
    spares = Spares(checkpoint)
    sources = {"store": checkpoint.source(), "spares": spares}
    kept = {s: bytearray(s.box.numel * s.itemsize) for s in checkpoint.specs.values()}
    offers = [*checkpoint.offers(), *spares.offers()]
    resolved = resolve([(s, s.box) for s in kept], offers, sources, lambda s, _: memoryview(kept[s]))
    assert {s: bytes(data) for s, data in kept.items()} == make_state(SMALL)
    assert resolved.sources["spares"].tiles > 0


def test_copies_by_other_ranks_are_offered() -> None:
    """A scalar is there once per rank that saved it; one damaged copy costs nothing."""
    store = fresh()
    save_and_commit(store, make_state(SMALL), world=3)
    checkpoint = open_checkpoint(store)
    scalar = next(tile for tile in checkpoint.tiles if not tile.spec.shape)
    assert {tile.digest for tile in checkpoint.copies} == {scalar.digest}
    flip(store, names.pack(scalar.pack), scalar.offset)
    resolved = restore(checkpoint, None, repair=True)
    assert (len(resolved.failures), resolved.repaired) == (1, 1)
    assert list(verify(store)) == []

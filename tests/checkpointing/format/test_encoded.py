"""Encoded tiles are restored, checked and refused like raw ones."""

from __future__ import annotations

import itertools
import json

import pytest

from checkpointing import Store, open_checkpoint, open_store, verify
from checkpointing.errors import MissingTile
from checkpointing.format import names
from checkpointing.format.codecs import Codec
from checkpointing.format.record import decode_record
from checkpointing.reading.findings import Fault
from tests.checkpointing.encoded import save_encoded, smooth
from tests.checkpointing.states import State, load

_numbers = itertools.count()
SHAPES = {
    "a": ("float32", (40, 8)),
    "b": ("bfloat16", (300,)),
    "c": ("int64", (6, 40)),
    "t": ("uint8", ()),
    "empty": ("float32", (0, 2)),
}


def two_steps(store: Store) -> tuple[State, State]:
    """Save step 1 as planes where that is shorter, step 2 as differences to it."""
    first, second = smooth(SHAPES), smooth(SHAPES, seed=1)
    bases = save_encoded(store, first, lambda spec: Codec.RAW if spec.key == "b" else Codec.PLANES)
    save_encoded(store, second, lambda _: Codec.XOR_PLANES, step=2, bases=bases, older=first)
    return first, second


def fresh() -> Store:
    return open_store(f"memory://encoded-{next(_numbers)}")


def test_byte_planes_and_differences_are_restored() -> None:
    """Each codec with bases of either kind, both of its steps; locators are JSON."""
    store = fresh()
    first, second = two_steps(store)
    newest = open_checkpoint(store)
    assert {tile.codec for tile in newest.tiles} == {Codec.XOR_PLANES, Codec.RAW}
    assert {tile.base.codec for tile in newest.tiles if tile.base} == {Codec.PLANES, Codec.RAW}
    assert all(json.loads(json.dumps(offer.where)) == offer.where for offer in newest.offers())
    assert load(newest)[0] == second
    assert load(open_checkpoint(store, next(store.list("checkpoints/"))[12:-7]))[0] == first
    assert list(verify(store)) == []


def test_a_record_counts_the_bytes_of_tensors_however_they_are_stored() -> None:
    """What `ls` calls the size of a checkpoint does not depend on its codec."""
    store = fresh()
    first, _ = two_steps(store)
    (plain, encoded) = (decode_record(store.get(name), name) for name in store.list("checkpoints/"))
    assert plain.totals.bytes == encoded.totals.bytes == sum(map(len, first.values()))


def test_every_flipped_byte_of_an_encoded_pack_is_found_and_never_restored() -> None:
    """In a tile, in the base of one, or in the index."""
    store = fresh()
    _, second = two_steps(store)
    bases = [tile.base for tile in open_checkpoint(store).tiles if tile.base]
    for name in list(store.list("packs/")):
        data = store.get(name)
        for place in range(0, len(data), 17):
            store.put(name, data[:place] + bytes([data[place] ^ 1 << place % 8]) + data[place + 1 :])
            findings = list(verify(store))
            assert {finding.object for finding in findings} == {name}, place
            in_tiles = place < int.from_bytes(data[-56:-48], "little")
            if in_tiles and place >= 8:
                (finding,) = findings
                assert (finding.fault, finding.pack, finding.rank) == (Fault.CORRUPT, names.parse_pack(name), 0)
                assert finding.tensor in SHAPES
                if any(b.pack == finding.pack and b.offset <= place < b.offset + b.length for b in bases):
                    assert len(finding.checkpoints) == 2, "its differences are lost with it"
            try:
                assert load(open_checkpoint(store))[0] == second
            except MissingTile:
                assert in_tiles
        store.put(name, data)


def test_a_missing_base_is_named() -> None:
    """A difference without its base is lost, and both the reader and verify say so."""
    store = fresh()
    two_steps(store)
    (pack, *_) = {tile.base.pack for tile in open_checkpoint(store).tiles if tile.base}
    store.delete(names.pack(pack))
    with pytest.raises(MissingTile, match="it is not there"):
        load(open_checkpoint(store))
    (finding,) = verify(store)
    assert (finding.fault, finding.pack, len(finding.checkpoints)) == (Fault.MISSING, pack, 2)

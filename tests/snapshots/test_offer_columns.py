"""Offers in binary: the same as they were, and of them exactly those of use."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpointing.format.tiles import Box, TensorSpec
from checkpointing.reading.sources import Offered
from elastic3d.snapshots import offer_columns
from elastic3d.snapshots.memory import SnapshotName
from elastic3d.snapshots.offer_columns import Offer
from elastic3d.snapshots.offers import OfferedShard, spell_out

SHAPES = ((), (7,), (5, 0), (6, 4), (3, 4, 5))
NAMES = ("10.0.0.1:7000", "10.0.0.2:7000", "store")


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    bounds = [sorted(draw(st.tuples(st.integers(0, size), st.integers(0, size)))) for size in shape]
    return Box(start=tuple(low for low, _ in bounds), stop=tuple(high for _, high in bounds))


@st.composite
def offers(draw: st.DrawFn) -> Offer:
    shape = draw(st.sampled_from(SHAPES))
    # One key stands for two tensors: the resolver has to see both to say so.
    key = draw(st.sampled_from(("a", f"of {len(shape)} dims")))
    spec, box = TensorSpec(key=key, dtype="float32", shape=shape), draw(boxes(shape))
    digest = st.text("0123456789abcdef", min_size=64, max_size=64)
    if draw(st.booleans()):
        where = draw(st.sampled_from(([1, 2, 3], {"pack": "p\u00e4ck", "offset": 1 << 40}, None)))
        return Offered(spec=spec, box=box, digest=draw(digest), source="store", where=where)
    return OfferedShard(
        spec=spec,
        box=box,
        source=draw(st.sampled_from(NAMES)),
        copies=tuple(draw(st.lists(st.sampled_from(NAMES), max_size=2))),
        generation=draw(st.integers(0, 3)),
        step=draw(st.integers(0, 1 << 40)),
        rank=draw(st.integers(0, 3)),
        offset=draw(st.integers(0, 1 << 45)),
        tile_bytes=4 << 20,
        digests="".join(draw(st.lists(digest, min_size=1, max_size=3))),
    )


@given(st.lists(offers(), max_size=8))
def test_offers_arrive_as_they_were(given: list[Offer]) -> None:
    """One by one and in order, with their tensors, sources and snapshots."""
    columns = offer_columns.decode(offer_columns.encode(given))
    assert list(columns) == given
    assert tuple(given) == columns
    assert columns != [*given, None]
    assert columns.specs.keys() == {offer.spec.key for offer in given}
    held = [offer for offer in given if isinstance(offer, OfferedShard)]
    assert columns.sources == {offer.source for offer in given}.union(*(offer.copies for offer in held))
    named = {(name, SnapshotName(one.generation, one.step, one.rank)) for one in held for name in one.sources}
    assert named == {(server, one) for server, names in columns.snapshots.items() for one in names}


@given(st.data(), st.lists(offers(), max_size=8))
def test_exactly_those_of_use_are_spelled_out(data: st.DataObject, given: list[Offer]) -> None:
    """Those that share an element with a wanted box, and all of a tensor that is wanted in another form."""
    wanted = {
        key: [data.draw(boxes(data.draw(st.sampled_from(SHAPES)))) for _ in range(2)]
        for key in data.draw(st.sets(st.sampled_from(("a", "of 0 dims", "of 1 dims", "of 2 dims", "of 3 dims"))))
    }
    columns = offer_columns.decode(offer_columns.encode(given))

    def of_use(offer: Offer) -> bool:
        mine = wanted.get(offer.spec.key, [])
        unlike = any(len(box.start) != len(offer.box.start) for box in mine)
        return bool(mine) and (unlike or any(box.intersect(offer.box) is not None for box in mine))

    assert list(columns.meeting(wanted)) == [offer for offer in given if of_use(offer)]


def test_a_rank_spells_out_its_own_tiles_alone() -> None:
    """Of columns as of offers one by one, with second copies as a spare."""
    spec = TensorSpec(key="w", dtype="float32", shape=(8,))
    shards = [
        OfferedShard(
            spec=spec,
            box=Box(start=(4 * rank,), stop=(4 * rank + 4,)),
            source=NAMES[rank],
            copies=(NAMES[1 - rank],),
            generation=1,
            step=1,
            rank=rank,
            offset=0,
            tile_bytes=8,
            digests=f"{rank:064x}" * 2,
        )
        for rank in range(2)
    ]
    mine = [(spec, Box(start=(5,), stop=(6,)))]
    columns = offer_columns.decode(offer_columns.encode(shards))
    tiles, plain = spell_out(columns, mine, NAMES), spell_out(shards, mine, NAMES)
    assert tiles == plain
    assert len(tiles) == 2
    assert tiles.spare("w") == plain.spare("w") != []


def test_a_digest_of_another_length_is_refused() -> None:
    """Two that are wrong together would otherwise cut all others wrongly."""
    spec = TensorSpec(key="w", dtype="float32", shape=(1,))
    tiles = [Offered(spec=spec, box=spec.box, digest=digits, source="s", where=0) for digits in ("0" * 62, "0" * 66)]
    with pytest.raises(ValueError, match="64 hexadecimal digits"):
        offer_columns.encode(tiles)

"""An island takes slices of the positions that all islands share, and accounts for the steps that it does not make."""

from __future__ import annotations

import random

from elastic3d.data import Order, check
from elastic3d.data.ledger import add, left_out
from elastic3d.values import from_json, to_json

ORDER = Order(length=37, global_batch=4, micro_batch=2, seed=5)


def test_positions_of_an_island_are_those_of_its_chunks() -> None:
    """Also across slices, within one, and after the order was written down."""
    island = ORDER.slicing(0, 24).slicing(12, 60)
    assert list(island.shared(10, 14)) == [(34, 36), (60, 62)]
    assert island.samples(10, 14).tolist() == [*ORDER.samples(34, 36).tolist(), *ORDER.samples(60, 62).tolist()]
    assert [island.place_of(position) for position in (0, 11, 12, 30)] == [24, 35, 60, 78]
    assert from_json(Order, to_json(island)) == island
    assert ORDER.place_of(7) == 7


def test_slices_are_found_wherever_positions_begin_and_end() -> None:
    """As by looking at each position alone."""
    draw = random.Random(3)
    starts = [0, *sorted(draw.sample(range(1, 200), 12))]
    island = ORDER
    for start in starts:
        island = island.slicing(start, 1000 * draw.randrange(1, 50) + start)
    for _ in range(100):
        first = draw.randrange(220)
        stop = first + draw.randrange(40)
        spread = [at for begin, end in island.shared(first, stop) for at in range(begin, end)]
        assert spread == [island.place_of(position) for position in range(first, stop)]
        slices = [max(one for one in island.slices if one[0] <= position) for position in range(first, stop)]
        assert spread == [taken + at - start for (start, taken), at in zip(slices, range(first, stop), strict=True)]


def test_a_slice_replaces_those_that_begin_there_or_later() -> None:
    """A round that is begun anew was trained nowhere."""
    assert ORDER.slicing(8, 16).slices == ((0, 0), (8, 16))
    assert ORDER.slicing(8, 16).slicing(8, 40).slices == ((0, 0), (8, 40))
    assert ORDER.following(ORDER.slicing(0, 12), 3).slices == ((0, 12),)


def test_steps_that_an_island_does_not_make_are_left_out() -> None:
    """Its ledger is whole, and says how many samples they would have had."""
    island = ORDER.slicing(8, 16).excluding(((0, 8),))
    ledger = left_out((), island, generation=1, layout="dp=1", first_step=0, stop_step=2)
    samples = island.samples(8, 12)
    ledger = add(
        ledger, generation=2, step=2, layout="dp=1", samples=len(samples), sample_sum=island.keyed_sum(samples)
    )
    account = check(ledger, island)
    assert account.whole
    assert (account.consumed, account.excluded) == (4, 8)
    assert not check(ledger[1:], island).whole

"""Who computes which leaf: every one has one owner, in order, and equal shares deal as if there were none."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic3d.data import Share
from elastic3d.errors import LayoutError
from elastic3d.owners import Owners
from elastic3d.values import Layout, from_json, rounds, to_json

SHARES = st.lists(st.integers(1, 9), min_size=1, max_size=6).map(tuple)


@given(SHARES, st.integers(0, 60))
def test_every_leaf_has_one_owner_and_turns_are_the_leaves_in_order(shares: tuple[int, ...], more: int) -> None:
    """A column's leaves ascend, it knows their places among its own, and it has some in the step's first turn."""
    owners = Owners(dp=len(shares), shares=shares)
    leaves = len(shares) + more
    turns = owners.steps_turns(leaves)
    assert len(turns) == owners.turns(leaves)
    assert turns[0].senders == tuple(range(len(shares)))
    dealt = [(turn.first + place, column) for turn in turns for place, column in enumerate(turn.senders)]
    assert [leaf for leaf, _ in dealt] == list(range(leaves))
    for column in range(len(shares)):
        own = [leaf for leaf in owners.leaves_of(column, len(turns)) if leaf < leaves]
        assert own == [leaf for leaf, owner in dealt if owner == column]
        assert own == sorted(own)
        assert [(owners.owner(leaf).column, owners.owner(leaf).number) for leaf in own] == [
            (column, number) for number in range(len(own))
        ]
        assert owners.most(leaves)[column] == len(own)


@given(SHARES)
def test_a_step_of_all_shares_gives_each_column_its_share(shares: tuple[int, ...]) -> None:
    owners = Owners(dp=len(shares), shares=shares)
    assert owners.most(sum(shares)) == shares
    assert owners.turns(sum(shares)) == max(shares)
    assert owners.most(3 * sum(shares)) == tuple(3 * share for share in shares)


@given(SHARES, st.integers(0, 60))
def test_one_that_sits_a_turn_out_has_its_newest_leaf_before_it(shares: tuple[int, ...], turn: int) -> None:
    owners = Owners(dp=len(shares), shares=shares)
    for column in range(len(shares)):
        newest = owners.newest(column, turn)
        own = [turn for turn in range(turn + 1) if column in owners.turn(turn).senders]
        last = owners.turn(own[-1])
        assert newest == last.first + last.senders.index(column)


@given(st.integers(1, 7), st.integers(1, 4), st.integers(1, 40), st.integers(1, 5), st.booleans())
def test_equal_shares_deal_as_if_there_were_none(dp: int, each: int, leaves: int, leaf: int, given_: bool) -> None:
    """Leaf l belongs to rank l % dp in turn l // dp; without shares what fills the last turn up is run, too."""
    count = leaves * leaf
    for index in range(dp):
        share = Share(dp=dp, index=index, leaf=leaf, shares=(each,) * dp if given_ else ())
        table = [(turn * dp + index) * leaf + number for turn in range(-(-leaves // dp)) for number in range(leaf)]
        assert share.micro_batches(0, count) == [number for number in table if number < count or not given_]
        assert share.rounds(count) == len(share.micro_batches(0, count))
    assert rounds(count, dp, leaf, (each,) * dp if given_ else ()) == -(-leaves // dp) * leaf


def test_who_sends_in_each_turn_of_a_step() -> None:
    """A column of half the largest share sits out every other turn; the last turn has whom there are leaves for."""
    turns = Owners(dp=3, shares=(1, 2, 2)).steps_turns(9)
    assert [turn.senders for turn in turns] == [(0, 1, 2), (1, 2), (0, 1, 2), (1,)]
    assert [turn.first for turn in turns] == [0, 3, 5, 8]


def test_audits_have_every_column_send_after_the_steps_own_turns() -> None:
    """Nothing that they send is one of the step's leaves."""
    share = Share(dp=2, shares=(1, 2), leaf=2, extra=lambda step, count: [count * 1000] * 4)
    turns = share.turns(0, 6)
    assert [(turn.first, turn.senders) for turn in turns] == [(0, (0, 1)), (2, (1,)), (3, (0, 1)), (5, (0, 1))]
    assert Share(dp=2).turns(0, 6) == ()


def test_shares_are_a_part_of_the_layout_wherever_it_is_written() -> None:
    layout = Layout(pp=1, dp=3, zero=2, shares=(2, 5, 5))
    assert from_json(Layout, to_json(layout)) == layout
    assert Layout.parse(layout.request()) == layout
    assert str(layout) == "pp 1 x dp 3 x tp 1, ZeRO-2, shares 2/5/5"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("dp=3,zero=2,shares=1/2", "give one for each, with dp=2"),
        ("zero=2,shares=1/2", "with dp=2"),
        ("dp=2,zero=2,shares=0/2", "1 or more; 0 is not one"),
        ("dp=2,zero=2,shares=1/x", "shares must be a whole number"),
        ("dp=2,shares=1/2", "use zero=2 with shares"),
        ("dp=2,pp=2,zero=2,shares=1/2", "shares are for pp=1"),
    ],
)
def test_shares_that_no_layout_can_have_are_refused(text: str, words: str) -> None:
    with pytest.raises(LayoutError, match=words):
        Layout.parse(text)

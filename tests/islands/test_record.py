"""How outer steps are sealed: who is merged, who is admitted, and what becomes of each chunk of samples."""

from __future__ import annotations

import random
from collections.abc import Collection

import pytest

from elastic3d.islands.record import Sealed, SentDelta, Setup, account, awaited, first, following, label, newest
from elastic3d.values import from_json, to_json


def sent(*islands: str) -> dict[str, SentDelta]:
    return {one: SentDelta(island=one, folder=f"deltas/{one}", checkpoint="c", root="r") for one in islands}


def after(before: Sealed, *islands: str, joined: Collection[str] = (), left: Collection[str] = ()) -> Sealed:
    return following(before, sent(*islands), joined=joined, left=left, by="x.1")


def test_all_that_asked_train_the_first_round() -> None:
    """Each with a chunk of its own, in order of names; of one name only the newest."""
    record = first(["west.1", "east.1", "east.2"], [], by="east.2")
    assert record.members == {"east.2": 0, "west.1": 1}
    assert record.fresh == 2


def test_deltas_are_added_up_in_order_of_names() -> None:
    """Whoever came first: the record says the order, and those who read it need no other."""
    record = after(first(["b.1", "a.1", "c.1"], [], by="a.1"), "c.1", "a.1", "b.1")
    assert [one.island for one in record.merged] == ["a.1", "b.1", "c.1"]
    assert record.members == {"a.1": 3, "b.1": 4, "c.1": 5}


def test_the_chunk_of_an_island_that_is_lost_is_handed_out_again() -> None:
    """To the first by name, before any fresh one."""
    before = first(["a.1", "b.1", "c.1"], [], by="a.1")
    record = after(before, "b.1", "c.1")
    assert record.lost == ("a.1",)
    assert record.members == {"b.1": 0, "c.1": 3}


def test_chunks_for_which_there_is_no_island_wait() -> None:
    """Until there is one."""
    before = first(["a.1", "b.1", "c.1"], [], by="a.1")
    record = after(before, "c.1")
    assert record.members == {"c.1": 0}
    assert record.returned == (1,)
    assert after(record, "c.1").members == {"c.1": 1}


def test_an_island_that_left_is_neither_awaited_nor_lost() -> None:
    """What it had sent before is merged."""
    before = first(["a.1", "b.1"], [], by="a.1")
    assert awaited(before, sent("a.1"), ["b.1"]) == []
    assert awaited(before, sent("a.1"), []) == ["b.1"]
    record = after(before, "a.1", left=["b.1"])
    assert (record.lost, record.members) == ((), {"a.1": 1})
    record = after(before, "a.1", "b.1", left=["b.1"])
    assert len(record.merged) == 2
    assert set(record.members) == {"a.1"}


def test_an_island_that_is_no_member_is_not_merged() -> None:
    """Its round was of another run of outer steps."""
    record = after(first(["a.1"], [], by="a.1"), "a.1", "z.1")
    assert [one.island for one in record.merged] == ["a.1"]


def test_newcomers_are_admitted_once() -> None:
    """And those of the name of an island that is alive are refused; of one that is not, admitted."""
    before = first(["a.1", "b.1"], [], by="a.1")
    record = after(before, "a.1", joined=["a.1", "b.1", "c.1", "a.2", "b.2"])
    assert record.admitted == ("b.2", "c.1")
    assert record.refused == ("a.2",)
    assert set(record.members) == {"a.1", "b.2", "c.1"}
    again = after(record, "a.1", "b.2", "c.1", joined=["a.1", "b.1", "c.1", "a.2", "b.2"])
    assert (again.admitted, again.refused) == ((), ())


def test_an_island_that_gave_its_number_up_is_admitted_under_the_next_one() -> None:
    """Also where the delta of the old number is merged at that outer step: nobody goes on under it."""
    before = first(["oslo.1", "paris.1"], [], by="oslo.1")
    record = after(before, "oslo.1", "paris.1", joined=["oslo.1", "paris.1", "paris.2"], left=["paris.1"])
    assert [one.island for one in record.merged] == ["oslo.1", "paris.1"]
    assert (record.admitted, record.refused) == (("paris.2",), ())
    assert record.members == {"oslo.1": 2, "paris.2": 3}


@pytest.mark.parametrize("seed", range(30))
def test_every_chunk_is_consumed_once_whatever_happens(seed: int) -> None:
    """Or waits, or is under way: by the records alone, and the records come through the store as they are."""
    chance = random.Random(seed)
    joined = ["a.1", "b.1"]
    left: set[str] = set()
    records = [first(joined, left, by="a.1")]
    for _ in range(40):
        if chance.random() < 0.3:
            name = chance.choice("abcde")
            joined.append(label(name, newest(joined).get(name, 0) + 1))
        if chance.random() < 0.1:
            left.add(chance.choice(joined))
        there = [one for one in records[-1].members if chance.random() < 0.8]
        record = after(records[-1], *there, joined=joined, left=left)
        assert from_json(Sealed, to_json(record)) == record
        assert set(record.members) <= {one.island for one in record.merged} | set(record.admitted)
        assert not set(record.members) & left
        records.append(record)
    chunks = account(records)
    assert chunks.whole
    assert chunks.consumed == sum(len(record.merged) for record in records)
    assert chunks.consumed + chunks.waiting + chunks.under_way == records[-1].fresh


def test_a_lost_or_doubled_chunk_shows() -> None:
    """The account is one of the records, not of what should be in them."""
    records = [first(["a.1"], [], by="a.1")]
    records.append(after(records[0], "a.1"))
    doubled = after(records[1], "a.1")
    assert account([*records, doubled]).whole
    wrong = Sealed(outer=2, merged=doubled.merged, members={"a.1": 0}, fresh=4)
    assert account([*records, wrong]).repeated == 1
    assert account([*records, wrong]).missing == 2


def test_a_setup_says_where_it_differs() -> None:
    """In the words of the script."""
    setup = Setup(
        model="m", parameters=1, initial="i", seed=1, data_seed=2, data="", samples=9, global_batch=4, micro_batch=2,
        leaf=1, precision="fp32", optimizer="AdamW", every=10, fragments=1, outer="nesterov", lr=0.7, momentum=0.9,
    )  # fmt: skip
    there = from_json(Setup, {**to_json(setup), "every": 20, "seed": 3})
    assert setup.differences(there) == ["run.shard(seed=) is 3 there, and 1 here", "every is 20 there, and 10 here"]
    assert setup.differences(setup) == []

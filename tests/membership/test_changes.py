"""A generation encoded as its changes to another: it decodes to the same generation or is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic3d import etcd_keys as keys
from elastic3d.errors import ConfigurationError
from elastic3d.etcd import KeyValue, Put
from elastic3d.membership import actions as acts
from elastic3d.membership import events as e
from elastic3d.membership.inspection.keys import find
from elastic3d.membership.reading import Reader, sealed
from elastic3d.membership.records import (
    BaseUnknown,
    GenerationHistory,
    Proposal,
    decode,
    encode,
    encode_change,
)
from elastic3d.membership.transactions import Transaction, transaction
from elastic3d.values import Cause, Generation
from tests.membership.test_records import ANY_JSON, GENERATIONS, NODES, large

KEY = "/job/board/generation"
PROPOSAL = "/job/board/proposal"
BIG = large(300, 8)
REQUEST = 1_572_864
"""Bytes of the largest request that etcd accepts."""


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Generation, Generation]:
    """Return two generations, the second with some nodes of the first, in any order, and others."""
    base, formed = draw(GENERATIONS), draw(GENERATIONS)
    known = [*base.nodes, *base.spares]
    if not known:
        return base, formed
    some = st.lists(st.one_of(st.sampled_from(known), NODES), max_size=8, unique_by=lambda node: node.id).map(tuple)
    return base, replace(formed, nodes=draw(some), spares=draw(some))


@settings(max_examples=50)
@given(pairs(), st.booleans())
def test_a_change_decodes_to_the_generation(pair: tuple[Generation, Generation], switch: bool) -> None:
    """Given the generation before it, whether sealed or proposed."""
    base, formed = pair
    assert decode(Generation, encode_change(formed, base), KEY, base=base) == formed
    proposal = Proposal(generation=formed, switch=switch)
    assert decode(Proposal, encode_change(proposal, base), PROPOSAL, base=base) == proposal
    for whole in (encode(formed), encode(base)) if formed == base else (encode(formed),):
        assert decode(Generation, encode_change(formed, base), KEY, whole=whole) == formed


@settings(max_examples=50)
@given(pairs(), st.sampled_from(["digest", "nodes", "spares", "added", "labels", "layout", "number"]), ANY_JSON)
def test_a_garbled_change_is_a_configuration_error(
    pair: tuple[Generation, Generation], field: str, value: object
) -> None:
    """No content of a change raises anything else, or decodes to another generation than was written."""
    base, formed = pair
    data = json.loads(encode_change(formed, base))
    data[field] = value
    try:
        decoded = decode(Generation, json.dumps(data).encode(), KEY, base=base)
    except ConfigurationError:
        return
    assert decoded == formed or "digest" not in data


def test_a_change_to_another_generation_is_detected() -> None:
    """The reader has to look for the whole record; if that is missing, garbled or another one, it is garbage."""
    formed = replace(BIG, number=8, nodes=BIG.nodes[1:])
    change = encode_change(formed, BIG)
    for base in (None, replace(BIG, nodes=BIG.nodes[::-1]), replace(BIG, nodes=())):
        with pytest.raises(BaseUnknown, match=r"/job/board\.whole/generation"):
            decode(Generation, change, KEY, base=base)
    assert decode(Generation, change, KEY, whole=encode(formed)) == formed
    for whole in (b"", b"garbage", encode(BIG), change):
        with pytest.raises(ConfigurationError, match="generation") as caught:
            decode(Generation, change, KEY, whole=whole)
        assert not isinstance(caught.value, BaseUnknown)


def seal(base: Generation, formed: Generation) -> Transaction:
    """Return the action that seals one generation after another."""
    history = GenerationHistory(
        number=formed.number, attempt=1, cause=formed.cause, detail="", leader="a", active=1, spares=0, joined=(),
        left=(), layout="", at=0.0,
    )  # fmt: skip
    action = acts.Seal(generation=formed, history=history, token=1, previous=1, base=base)
    return transaction("/job/", formed.nodes[0], action)


def puts(made: Transaction) -> dict[str, bytes]:
    """Return the writes of a transaction."""
    return {one.key: one.value for one in made.operations if isinstance(one, Put)}


def test_a_small_change_is_small_for_ten_thousand_watchers() -> None:
    """A hundred of ten thousand nodes change: each watcher gets a hundredth of the record, and etcd accepts it."""
    base = large(10_000, 8)
    come = tuple(replace(node, incarnation="new") for node in base.nodes[5000:5100])
    formed = replace(base, number=8, cause=Cause.DEATH, nodes=(*base.nodes[:5000], *come, *base.nodes[5100:]))
    written = puts(seal(base, formed))
    assert len(written[KEY]) < 32_768
    assert sum(map(len, written.values())) < REQUEST
    assert decode(Generation, written[KEY], KEY, base=base) == formed


def test_small_and_entirely_new_generations_are_written_whole() -> None:
    """Where a change saves nothing, the whole record is on the board and there is no other."""
    small, other = large(8, 2), replace(BIG, number=8, nodes=large(299, 7).nodes)
    for base, formed in ((small, replace(small, number=8)), (BIG, other)):
        made = seal(base, formed)
        assert decode(Generation, puts(made)[KEY], KEY) == formed
        assert keys.whole(KEY) not in puts(made)
        assert [one.key for one in made.operations if one.key == keys.whole(KEY)]


class Board:
    """The keys of the board, and its revision."""

    def __init__(self) -> None:
        self.revision = 0
        self.there: dict[str, KeyValue] = {}

    def put(self, written: dict[str, bytes]) -> Iterator[KeyValue]:
        """Write, and yield what a watch of the board receives."""
        self.revision += 1
        for key, value in written.items():
            item = KeyValue(key=key, value=value, create_revision=1, mod_revision=self.revision, version=1)
            self.there[key] = item
            if key.startswith("/job/board/"):
                yield item


def test_a_reader_applies_changes_and_notices_gaps() -> None:
    """It lists, applies changes one after another, and reports when it has to list again."""
    board, reader, late = Board(), Reader("/job/"), Reader("/job/")
    second, third = replace(BIG, number=8, nodes=BIG.nodes[1:]), replace(BIG, number=9, nodes=BIG.nodes[2:])
    list(board.put({KEY: encode(BIG)}))
    [first] = reader.listed(list(board.there.values()))
    assert isinstance(first, e.GenerationPut)

    [item] = board.put(puts(seal(BIG, second)))
    with pytest.raises(BaseUnknown):
        late.changed(item.key, item, item.mod_revision)
    assert reader.changed(item.key, item, item.mod_revision) == e.GenerationPut(generation=second, revision=2)
    assert sealed("/job/", list(board.there.values())) == second
    shown = find("/job/", board.there.values())
    assert (shown.generation, shown.problems) == (second, [])

    assert e.GenerationPut(generation=second, revision=2) in late.listed(list(board.there.values()))
    proposal = Proposal(generation=third)
    [item] = board.put({PROPOSAL: encode_change(proposal, second), keys.whole(PROPOSAL): encode(third)})
    for one in (reader, late):
        assert one.changed(item.key, item, item.mod_revision) == e.ProposalPut(proposal=proposal, revision=3)
    assert e.ProposalPut(proposal=proposal, revision=3) in Reader("/job/").listed(list(board.there.values()))

    [garbage] = board.put({KEY: b"garbage"})
    assert isinstance(reader.changed(KEY, garbage, 4), e.GenerationSpoiled)
    [item] = board.put(puts(seal(second, third)))
    with pytest.raises(BaseUnknown):
        reader.changed(item.key, item, item.mod_revision)
    del board.there[keys.whole(KEY)]
    assert e.GenerationSpoiled(revision=5, stands=5) in reader.listed(list(board.there.values()))

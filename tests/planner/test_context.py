"""Layouts of sequences that are cut into chunks: which there are, and what they are predicted to need."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic3d.errors import LayoutError
from elastic3d.health.phases import Axis
from elastic3d.health.waits import members
from elastic3d.planner import legal_layouts, place_of, plan
from elastic3d.planner.legality import unfit
from elastic3d.planner.memory import memory
from elastic3d.planner.ranking import rank
from elastic3d.planner.step_time import seconds
from elastic3d.planner.traffic import gradient_traffic
from elastic3d.values import Layout, from_json, to_json
from tests.planner.machines import costs, profile

LONG = replace(profile(), chunks=8)


def test_a_layout_that_was_written_without_cp_has_one() -> None:
    """Records in etcd and in checkpoints stay readable, and layouts without cp are spelled as before."""
    written = to_json(Layout(pp=2, dp=3))
    del written["cp"]
    assert from_json(Layout, written) == Layout(pp=2, dp=3, cp=1)
    assert str(Layout(pp=2, dp=3)) == "pp 2 x dp 3 x tp 1, ZeRO-3"
    assert str(Layout(pp=1, dp=3, cp=2)) == "pp 1 x dp 3 x cp 2 x tp 1, ZeRO-3"
    assert Layout.parse("dp=3,cp=2").request() == "dp=3,cp=2"


def test_ranks_that_share_a_sequence_are_neighbours() -> None:
    """So that they are on one node; peers on dp have the same chunks, and shards are cut over both."""
    layout = Layout(pp=1, dp=2, cp=2)
    assert [(place_of(rank, layout).dp, place_of(rank, layout).cp) for rank in range(4)] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
    ]
    assert members(Axis.CP, 2, layout) == (2, 3)
    assert members(Axis.DP, 2, layout) == (0, 2)
    assert members(Axis.SHARD, 2, layout) == (0, 1, 2, 3)
    assert layout.shards == 4


@pytest.mark.parametrize(
    ("layout", "chunks", "words"),
    [
        ("pp=1,dp=2,cp=2", 1, "needs sequences that are cut"),
        ("pp=1,dp=1,cp=3", 8, "does not divide the 8 chunks"),
        ("pp=2,dp=1,cp=2", 8, "use pp=1"),
        ("pp=1,dp=2,cp=2,tp=2", 8, "use tp=1"),
        ("pp=1,dp=2,replicas=2", 8, "use replicas=1"),
        ("pp=1,dp=2,zero=2,shares=1/2", 8, "use none"),
    ],
)
def test_layouts_that_chunks_rule_out_are_refused_with_the_reason(layout: str, chunks: int, words: str) -> None:
    """The planner refuses by the same words as the trainers."""
    reason = unfit(Layout.parse(layout), replace(LONG, chunks=chunks))
    assert reason is not None
    assert words in reason


def test_what_is_asked_for_and_does_not_go_with_chunks_is_said_to_be_that() -> None:
    """Not that sizes do not fit, which more nodes would change."""
    with pytest.raises(LayoutError, match="use pp=1"):
        plan(2, 4, replace(LONG, chunks=8), Layout(pp=2))


def test_cp_is_one_unless_it_is_asked_for_or_left_free() -> None:
    """As tp is; a free one may be any that divides the chunks and the slots of a node."""
    assert {one.cp for one in legal_layouts(8, LONG, Layout())} == {1}
    assert {one.cp for one in legal_layouts(8, LONG, Layout(cp=4))} == {4}
    ranked = rank(2, 4, LONG, Layout(cp=0, zero=2), costs()).ranking
    assert {one.layout.cp for one in ranked} == {1, 2, 4}
    assert plan(2, 4, LONG, Layout(cp=2)).layout == Layout(pp=1, dp=4, cp=2)
    with pytest.raises(LayoutError, match="cp must divide the slots"):
        plan(2, 4, LONG, Layout(cp=8))
    with pytest.raises(LayoutError, match=r"\(asked for: cp=2\); .*cp must divide the slots"):
        plan(4, 1, replace(LONG, chunks=2), Layout(cp=2))
    previous = Layout(pp=1, dp=4, cp=2)
    assert plan(2, 4, LONG, Layout(cp=4), previous=previous).layout == Layout(pp=1, dp=2, cp=4)


def test_more_ranks_for_a_sequence_need_less_memory_each() -> None:
    """Activations and logits are divided; keys and values of the whole sequence are not."""
    one, four = (memory(Layout(pp=1, dp=1, cp=cp), LONG) for cp in (1, 4))
    for name in ("activations", "logits", "parameters", "optimizer"):
        assert four[name] == pytest.approx(one[name] / 4, rel=0.01)
    assert four["keys and values"] == one["keys and values"] == 2 * LONG.boundary * LONG.blocks
    assert "keys and values" not in memory(Layout(pp=1, dp=1), profile())


def test_a_step_is_divided_and_its_exchanges_are_counted() -> None:
    """The longer links take, the more a step does."""
    one, four = (seconds(Layout(pp=1, dp=2, cp=cp), LONG, costs(), 4) for cp in (1, 4))
    assert four["compute"] == pytest.approx(one["compute"] / 4)
    assert "context parallel" not in one
    assert four["context parallel"] > 0


def test_between_nodes_a_micro_batch_is_sent_once() -> None:
    """Whatever the number of chunks: those of a node are added up first."""
    whole = gradient_traffic(Layout(pp=1, dp=2), LONG, 1)
    shared = gradient_traffic(Layout(pp=1, dp=2, cp=4), LONG, 4)
    assert shared.turn == pytest.approx(whole.turn)

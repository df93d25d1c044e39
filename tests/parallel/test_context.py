"""Sequences whose chunks are shared by ranks of a node: the same bits for every number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elastic3d.values import Layout
from tests.parallel import contexts
from tests.parallel.agreed import carried_on, result
from tests.parallel.worlds import Orders, run_world

pytestmark = [pytest.mark.gloo, pytest.mark.long]


@pytest.fixture(scope="module")
def reference() -> Any:
    """The run of one rank that computes all chunks, which every layout must equal."""
    return result(contexts.train, "pp=1,dp=1")


def test_chunks_train_like_whole_sequences() -> None:
    """Without dropout, losses and gradient norms are those of uncut sequences up to rounding."""
    _, losses, norms = result(contexts.train_uncut, "pp=1,dp=1")
    _, chunked, chunked_norms = result(contexts.train_plain, "pp=1,dp=1,cp=2")
    assert chunked == pytest.approx(losses, abs=1e-6)
    assert chunked_norms == pytest.approx(norms, abs=1e-5)


@pytest.mark.parametrize(
    "layout", ["pp=1,dp=1,cp=2", "pp=1,dp=1,cp=4,zero=2", "pp=1,dp=2,zero=2", "pp=1,dp=2,cp=2,zero=3"]
)
def test_every_cp_and_dp_ends_with_one_digest(reference: Any, layout: str) -> None:
    """Parameters and AdamW state, losses and norms: with dropout, clipping and parameters that few chunks use."""
    assert result(contexts.train, layout) == reference


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    ["pp=1,dp=1,cp=4", "pp=1,dp=2,cp=2,zero=1", "pp=1,dp=2,cp=2,zero=2", "pp=1,dp=3,cp=2", "pp=1,dp=2,cp=4,zero=2"],
)
def test_further_layouts_end_with_the_same_digest(reference: Any, layout: str) -> None:
    """More shapes, uneven shards among them."""
    assert result(contexts.train, layout) == reference


def test_recomputed_blocks_change_no_bit(reference: Any) -> None:
    """Attention that is computed again gets the keys and values that were exchanged at first."""
    assert result(contexts.train_again, "pp=1,dp=1,cp=2") == reference


def test_rounded_products_and_counted_tokens_keep_the_promise() -> None:
    """In bf16, with a loss over some tokens, a micro-batch left out and blocks computed again."""
    assert result(contexts.train_counted, "pp=1,dp=2,cp=2") == result(contexts.train_counted, "pp=1,dp=1")


def test_leaves_of_several_micro_batches_keep_the_promise() -> None:
    """Chunks are added up over all micro-batches of a leaf."""
    assert result(contexts.train_leaves, "pp=1,dp=1,cp=4") == result(contexts.train_leaves, "pp=1,dp=1")


def test_attention_to_later_positions_takes_a_rank_for_each_chunk() -> None:
    """Then it trains like whole sequences; with fewer ranks it is refused by name."""
    _, losses, norms = result(contexts.train_both_ways_uncut, "pp=1,dp=1")
    _, chunked, chunked_norms = result(contexts.train_both_ways, "pp=1,dp=1,cp=4")
    assert chunked == pytest.approx(losses, abs=1e-6)
    assert chunked_norms == pytest.approx(norms, abs=1e-5)
    for report in run_world(contexts.train_both_ways, Orders(layout=Layout.parse("pp=1,dp=1,cp=2"))):
        assert report.ended == "raised"
        assert "attention in 'blocks.0' looks at later positions too" in report.error
        assert "cp=4, or chunks=2" in report.error


def test_a_change_of_cp_and_dp_changes_no_bit(reference: Any, tmp_path: Path) -> None:
    """Leaving at a step and going on with other numbers of ranks ends with the same digest."""
    layouts = ["pp=1,dp=1,cp=2", "pp=1,dp=2,zero=2", "pp=1,dp=1,cp=4"]
    assert carried_on(contexts.train, layouts, tmp_path)[0] == reference[0]


def test_other_chunks_than_those_of_the_state_are_refused(tmp_path: Path) -> None:
    """They would give other bits."""
    first = Orders(layout=Layout(pp=1, dp=1), keep=tmp_path, leave_at={0: 0})
    assert [report.ended for report in run_world(contexts.train, first)] == ["left"]
    (report,) = run_world(contexts.train_watched, Orders(layout=Layout(pp=1, dp=1), take=tmp_path))
    assert report.ended == "raised"
    assert "was trained with chunks=4, and this script has chunks=1" in report.error


def test_an_evaluation_is_the_same_on_any_number_of_ranks() -> None:
    """Whole sequences are passed forward, and each sample counts once."""
    assert result(contexts.train_evaluated, "pp=1,dp=1,cp=2") == result(contexts.train_evaluated, "pp=1,dp=1")


@pytest.mark.parametrize(
    ("main", "layout", "orders", "words"),
    [
        (contexts.train_uncut, "pp=1,dp=1,cp=2", {}, "cp=2 needs sequences that are cut"),
        (contexts.train, "pp=1,dp=1,cp=3", {}, "cp=3 does not divide the 4 chunks"),
        (contexts.train, "pp=2,dp=1", {}, "pp=2 does not go with sequences that are cut"),
        (contexts.train, "pp=1,dp=1", {"numerics": "skip"}, "several ranks compute one together"),
        (contexts.train_shifting, "pp=1,dp=1", {}, "needs a loss that is computed position by position"),
    ],
    ids=["uncut", "divisor", "pp", "numerics", "loss"],
)
def test_what_cannot_be_cut_is_refused_by_name(
    main: Callable[..., Any], layout: str, orders: dict[str, Any], words: str
) -> None:
    """On every rank alike, with what would work."""
    for report in run_world(main, Orders(layout=Layout.parse(layout), **orders)):
        assert report.ended == "raised"
        assert words in report.error

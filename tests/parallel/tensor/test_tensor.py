from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elastic3d.values import Layout
from tests.parallel import tensors
from tests.parallel.agreed import carried_on, finished, result
from tests.parallel.worlds import Orders, run_world

pytestmark = [pytest.mark.gloo, pytest.mark.long]


@pytest.fixture(scope="module")
def reference() -> Any:
    """The run of one place on pp and dp with tp=2, which every other must equal."""
    return result(tensors.train, Layout(pp=1, dp=1, tp=2))


def test_tensor_parallel_layers_train_like_one_rank() -> None:
    """Without dropout, losses and gradient norms of tp=2 equal those of one rank up to rounding."""
    _, losses, norms = result(tensors.train_plain, Layout(pp=1, dp=1))
    _, parted, parted_norms = result(tensors.train_plain, Layout(pp=1, dp=1, tp=2))
    _, whole, whole_norms = result(tensors.train_whole_plain, Layout(pp=1, dp=1, tp=2))
    for computed, norm in ((parted, parted_norms), (whole, whole_norms)):
        assert computed == pytest.approx(losses, abs=1e-5)
        assert norm == pytest.approx(norms, abs=1e-5)


@pytest.mark.parametrize("layout", ["pp=2,dp=1,tp=2", "pp=1,dp=2,tp=2,zero=2", "pp=2,dp=2,tp=2,zero=3"])
def test_every_layout_of_one_tp_ends_with_one_digest(reference: Any, layout: str) -> None:
    """Parameters and AdamW state, losses and norms, with dropout on parts and on whole activations."""
    assert result(tensors.train, Layout.parse(layout)) == reference


def test_recomputed_blocks_change_no_bit(reference: Any) -> None:
    """A recomputed block sees the same parameters as at first, and draws the same numbers."""
    assert result(tensors.train_again, Layout.parse("pp=2,dp=1,tp=2")) == reference


@pytest.mark.parametrize("layout", ["pp=1,dp=2,tp=2,zero=2"])
def test_whole_parameters_that_are_unfrozen_in_the_run_keep_the_promise(reference: Any, layout: str) -> None:
    """The gradients of their micro-batches are summed over the ranks one by one, as if they had never been frozen."""
    alone = result(tensors.train_thawed, Layout(pp=1, dp=1, tp=2))
    assert alone != reference
    assert result(tensors.train_thawed, Layout.parse(layout)) == alone


@pytest.mark.parametrize("layout", ["pp=1,dp=2,tp=2,zero=2", "pp=1,dp=2,tp=2,zero=3"])
def test_leaves_of_parameters_that_ranks_hold_whole_keep_the_promise(layout: str) -> None:
    """Each micro-batch's gradient is summed over the tensor-parallel ranks before a leaf's next one is added to it."""
    alone = result(tensors.train_in_leaves, Layout(pp=1, dp=1, tp=2))
    assert result(tensors.train_in_leaves, Layout.parse(layout)) == alone


@pytest.mark.slow
def test_leaves_keep_the_promise_where_gradients_of_weights_come_apart() -> None:
    """Ranks meet in the order in which autograd comes to the weights, and not in that in which they are added up."""
    alone = result(tensors.train_leaves, Layout(pp=1, dp=1, tp=2))
    split = Layout.parse("pp=2,dp=2,tp=2,zero=2,schedule=zero-bubble,virtual=2")
    assert result(tensors.train_leaves, split) == alone


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["pp=1,dp=3,tp=2", "pp=1,dp=2,tp=2,zero=3", "pp=2,dp=3,tp=2,zero=2"])
def test_further_layouts_end_with_the_same_digest(reference: Any, layout: str) -> None:
    """More shapes, uneven shards among them."""
    assert result(tensors.train, Layout.parse(layout)) == reference


@pytest.mark.slow
@pytest.mark.parametrize(("tp", "layouts"), [(2, ["pp=2,dp=2,tp=2"]), (4, ["pp=2,dp=1,tp=4", "pp=1,dp=2,tp=4"])])
def test_plans_with_whole_activations_keep_the_promise(tp: int, layouts: list[str]) -> None:
    """Without sequence parallelism as well, and for another tp."""
    one = result(tensors.train_whole, Layout(pp=1, dp=1, tp=tp))
    for layout in layouts:
        assert result(tensors.train_whole, Layout.parse(layout)) == one


@pytest.mark.parametrize(("before", "after"), [("pp=2,dp=1,tp=2", "pp=1,dp=3"), ("pp=1,dp=3", "pp=1,dp=2,tp=2")])
def test_state_moves_between_layouts_whose_tp_differs(before: str, after: str, tmp_path: Path) -> None:
    """The state saved after two steps is loaded under another tp to the last bit."""
    first = Layout.parse(before)
    saved = finished(tensors.train_two, first, keep=tmp_path, snapshot_every=2)
    reports = finished(tensors.train_two, Layout.parse(after), take=tmp_path)
    assert {report.restored for report in reports} == {("memory", 2, 1)}
    assert {report.result[0] for report in reports} == {saved[0].result[0]}


@pytest.mark.slow
def test_a_change_of_pp_and_dp_changes_no_bit(reference: Any, tmp_path: Path) -> None:
    """With one tp, leaving and going on elsewhere ends with the same digest."""
    layouts = ["pp=1,dp=2,tp=2", "pp=2,dp=1,tp=2", "pp=1,dp=1,tp=2"]
    assert carried_on(tensors.train, layouts, tmp_path)[0] == reference[0]


@pytest.mark.parametrize(
    ("main", "tp", "words"),
    [
        (tensors.train_unplanned, 2, "tp=2 needs to know how layers are cut"),
        (
            tensors.train_too_wide,
            3,
            "tp=3 does not divide num_heads of module 'blocks.0' (4)",
        ),
        (tensors.train_unsaid, 2, "'blocks.1.q_norm.bias' is in no pattern of tensor=, and was taken for 'replicated'"),
        (tensors.train_apart, 2, "tp=2 puts ranks that compute one layer on different nodes"),
        (tensors.train_wrongly, 2, "'blocks.0.q' is computed on the whole sequence but gets a part of it"),
    ],
    ids=["no plan", "heads", "unsaid", "nodes", "parts"],
)
def test_layers_that_cannot_be_cut_are_refused_by_name(main: Callable[..., Any], tp: int, words: str) -> None:
    """On every rank alike, with what would work."""
    for report in run_world(main, Orders(layout=Layout(pp=1, dp=1, tp=tp))):
        assert report.ended == "raised"
        assert words in report.error


def test_the_profile_says_what_tp_must_divide() -> None:
    """The planner knows the possible sizes of tp before any layer is cut."""
    (report,) = run_world(tensors.measured, Orders(layout=Layout(pp=1, dp=1), measuring=True))
    assert report.ended == "measured", report.error
    assert report.profile is not None
    assert report.profile.heads == 4

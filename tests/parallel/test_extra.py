"""What scripts keep beside the model has the same bits in every layout, and over every change of it."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from elastic3d.values import Layout
from tests.parallel import extra_mains as mains
from tests.parallel.worlds import Orders, Report, run_world

pytestmark = pytest.mark.gloo


def ended(reports: list[Report], how: str) -> list[Report]:
    for report in reports:
        assert report.ended == how, report.error
    return reports


@pytest.fixture(scope="module")
def reference() -> Report:
    """The run of one rank, which every layout must equal."""
    return ended(run_world(mains.followed, Orders(layout=Layout(pp=1, dp=1))), "done")[0]


@pytest.mark.parametrize(
    "layout",
    [
        Layout(pp=2, dp=1),
        Layout(pp=1, dp=2, zero=2),
        Layout(pp=1, dp=3, zero=3),
        Layout(pp=2, dp=2, zero=3),
        Layout(pp=1, dp=4, zero=3, replicas=2),
    ],
    ids=str,
)
def test_averages_and_values_are_the_same_in_every_layout(reference: Report, layout: Layout) -> None:
    """Averaged by torch's functions and by the script's, after the step and before it."""
    for report in ended(run_world(mains.followed, Orders(layout=layout)), "done"):
        assert report.result == reference.result


def test_averages_leave_out_tables_that_only_another_stage_has() -> None:
    """Copies are made before it is known which stages compute with a module that has no parameters."""
    main = partial(mains.followed, plan="places")
    (alone,) = ended(run_world(main, Orders(layout=Layout(pp=1, dp=1))), "done")
    for layout in (Layout(pp=2, dp=1), Layout(pp=2, dp=2, zero=2)):
        for report in ended(run_world(main, Orders(layout=layout, snapshot_every=1)), "done"):
            assert report.result == alone.result


def test_state_saved_in_one_layout_goes_on_in_the_next(reference: Report, tmp_path: Path) -> None:
    """Step by step from world to world, to the end that one rank reaches alone."""
    layouts = [Layout(pp=2, dp=1), Layout(pp=1, dp=3, zero=3), Layout(pp=2, dp=2, zero=2), Layout(pp=1, dp=1)]
    before = None
    for step, layout in enumerate(layouts[:3], 1):
        kept = tmp_path / str(step)
        kept.mkdir()
        orders = Orders(layout=layout, keep=kept, take=before, leave_at=dict.fromkeys(range(layout.world), 0))
        for report in ended(run_world(mains.followed, orders), "left"):
            assert report.error == str(step)
        before = kept
    (last,) = ended(run_world(mains.followed, Orders(layout=layouts[3], take=before)), "done")
    assert last.restored == ("memory", 3, 3)
    assert last.result == reference.result


def test_averages_of_layers_that_are_cut_go_on_in_the_next_layout(tmp_path: Path) -> None:
    """With tensor parallelism, which stays as it is, and some of whose weights are whole on each rank."""
    main = partial(mains.followed, plan="tensor")
    whole = ended(run_world(main, Orders(layout=Layout(pp=1, dp=1, tp=2))), "done")
    leaving = Orders(layout=Layout(pp=1, dp=2, tp=2), keep=tmp_path, leave_at=dict.fromkeys(range(4), 1))
    ended(run_world(main, leaving), "left")
    for report in ended(run_world(main, Orders(layout=Layout(pp=2, dp=1, tp=2), take=tmp_path)), "done"):
        assert report.result == whole[0].result


@pytest.mark.parametrize("layout", [Layout(pp=1, dp=2), Layout(pp=2, dp=1)], ids=str)
@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("value", "extra['counted']['seen']"),
        ("tensor", "extra['counted']['table']['rows']"),
        ("dtype", "extra['counted']['table']['rows'] is not the same on ranks 0 and 1, and 1 more are not"),
    ],
)
def test_what_ranks_have_otherwise_is_refused_by_name_when_the_run_begins(
    layout: Layout, what: str, named: str
) -> None:
    """On every rank, and before the first step."""
    for report in ended(run_world(partial(mains.unlike, at=0, what=what), Orders(layout=layout)), "raised"):
        assert f"run.restore: {named}" in report.error
        assert "not the same on ranks 0 and 1" in report.error
        assert report.records == []


@pytest.mark.parametrize("layout", [Layout(pp=1, dp=2), Layout(pp=2, dp=1)], ids=str)
@pytest.mark.parametrize(
    ("what", "named"), [("value", "['seen']"), ("tensor", "['table']['rows']"), ("new", "['new']")]
)
def test_what_becomes_different_is_refused_in_the_step_after_the_snapshot(
    layout: Layout, what: str, named: str
) -> None:
    """No step is made on from a snapshot that is not the same on all ranks."""
    orders = Orders(layout=layout, snapshot_every=1)
    for report in ended(run_world(partial(mains.unlike, at=2, what=what), orders), "raised"):
        assert "run.step: after step 2: extra['counted']" in report.error
        assert f"{named} is not the same on ranks 0 and 1" in report.error
        assert [record.step for record in report.records] == [1, 2]


def test_tensors_of_one_stage_are_compared_among_its_ranks_alone() -> None:
    """Stages have different averages, and replicas of one have to have the same buffers in them."""
    orders = Orders(layout=Layout(pp=2, dp=2), snapshot_every=1)
    for report in ended(run_world(mains.buffered, orders), "raised"):
        assert "extra['ema']['module.blocks.3.count'] is not the same on ranks 2 and 3" in report.error
        assert [record.step for record in report.records] == [1, 2]


def test_an_average_by_a_list_function_of_the_scripts_own_is_refused_where_torch_takes_no_such_lists() -> None:
    """Only where some of its tensors are spread over ranks and others are not."""
    dp, pp = Orders(layout=Layout(pp=1, dp=2)), Orders(layout=Layout(pp=2, dp=1))
    for report in ended(run_world(partial(mains.averaged, use_buffers=True, called=False), dp), "raised"):
        assert "extra='ema' averages by a multi_avg_fn of the script's own" in report.error
        assert "get_ema_multi_avg_fn, or an avg_fn" in report.error
        assert report.records == []
    for buffers, orders in ((False, dp), (True, pp)):
        for report in ended(run_world(partial(mains.averaged, use_buffers=buffers, called=False), orders), "done"):
            assert report.result == 2


@pytest.mark.parametrize("layout", [Layout(pp=1, dp=2), Layout(pp=2, dp=1)], ids=str)
def test_an_average_that_is_spread_over_ranks_is_not_called(layout: Layout) -> None:
    """It says how to evaluate instead."""
    main = partial(mains.averaged, use_buffers=False, called=True)
    for report in ended(run_world(main, Orders(layout=layout)), "raised"):
        assert "ckpt export STORE FILE --prefix extra/NAME/module." in report.error


def test_what_only_some_ranks_keep_is_refused_on_all() -> None:
    """None of them waits for the others."""
    for report in ended(run_world(mains.on_one_rank, Orders(layout=Layout(pp=1, dp=2))), "raised"):
        assert "extra= has ['counted'] on rank 0, and [] on rank 1" in report.error


@pytest.mark.parametrize("layout", [Layout(pp=1, dp=2), Layout(pp=2, dp=1)], ids=str)
def test_a_copy_has_initial_weights_which_are_drawn_only_where_no_state_brings_them(
    layout: Layout, tmp_path: Path
) -> None:
    """Whether a state is expected or not, is there or not, and has the copy or not."""
    (tmp_path / "with").mkdir()
    (tmp_path / "without").mkdir()
    whole = ended(run_world(partial(mains.reference, kept=True, steps=3), Orders(layout=layout)), "done")
    for expected, made in ((False, 0), (True, 1)):
        orders = Orders(layout=layout, expects_state=expected)
        for report, same in zip(
            ended(run_world(partial(mains.reference, kept=True, steps=3), orders), "done"), whole, strict=True
        ):
            assert report.result[0] == made
            assert_same(report, same)
    for kept, folder, drawn in ((True, tmp_path / "with", 0), (False, tmp_path / "without", 1)):
        main = partial(mains.reference, kept=kept, steps=9)
        leaving = Orders(layout=layout, keep=folder, leave_at=dict.fromkeys(range(2), 1))
        ended(run_world(main, leaving), "left")
        again = run_world(partial(mains.reference, kept=kept, steps=3), Orders(layout=layout, take=folder))
        for report, same in zip(ended(again, "done"), whole, strict=True):
            assert report.restored == ("memory", 2, 1)
            assert report.result[0] == drawn
            assert_same(report, same, digest=kept)


def assert_same(report: Report, same: Report, *, digest: bool = True) -> None:
    _, first, end = report.result
    _, begun, ended_with = same.result
    assert first.keys() == begun.keys()
    assert all(torch.equal(one, begun[name]) for name, one in first.items())
    assert (end == ended_with) == digest

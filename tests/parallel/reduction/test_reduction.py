"""Reductions over real ranks: one digest for replicas and ZeRO stages, agreement up to rounding elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from elastic3d.errors import UsageError
from elastic3d.training import Run, run_alone
from elastic3d.values import Layout
from tests.parallel import mains, numeric_mains, pipeline_mains, tensors
from tests.parallel.worlds import Orders, Report, run_world

pytestmark = pytest.mark.gloo


def finished(reports: list[Report]) -> list[Report]:
    for report in reports:
        assert report.ended == "done", report.error
    return reports


@pytest.fixture(scope="module")
def reference() -> Report:
    """The run of one rank, which every layout must equal."""
    return finished(run_world(mains.train, Orders(layout=Layout(pp=1, dp=1))))[0]


@pytest.mark.parametrize(
    "layout",
    [
        Layout(pp=1, dp=2, replicas=2, zero=1),
        Layout(pp=1, dp=4, replicas=2, zero=3),
        Layout(pp=1, dp=3, zero=1),
        Layout(pp=2, dp=2, replicas=2, zero=2),
    ],
    ids=Layout.request,
)
def test_replicas_and_zero_stages_change_no_bit(reference: Report, layout: Layout) -> None:
    """With sums over replicas, uneven shards, unused parameters and clipping there is one digest."""
    equals(reference, layout)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        Layout(pp=1, dp=2, replicas=2, zero=3),
        Layout(pp=1, dp=4, replicas=2, zero=1),
        Layout(pp=1, dp=4, replicas=2, zero=2),
        Layout(pp=1, dp=4, replicas=4, zero=3),
        Layout(pp=1, dp=6, replicas=3, zero=3),
        Layout(pp=1, dp=6, replicas=2, zero=3),
        Layout(pp=2, dp=4, replicas=2, zero=1),
    ],
    ids=Layout.request,
)
def test_further_replicas_change_no_bit(reference: Report, layout: Layout) -> None:
    """More shapes, some with parts of shards that are shorter than others."""
    equals(reference, layout)


def equals(reference: Report, layout: Layout) -> None:
    reports = finished(run_world(mains.train, Orders(layout=layout)))
    assert {report.result for report in reports} == {reference.result}
    for report in reports:
        mine = [(r.step, r.loss, r.gradient_norm) for r in report.records]
        assert mine == [(r.step, r.loss, r.gradient_norm) for r in reference.records]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("main", "one", "layout"),
    [
        (tensors.train, "pp=1,dp=1,tp=2", "pp=1,dp=4,tp=2,zero=1,replicas=2"),
        (tensors.train, "pp=1,dp=1,tp=2", "pp=1,dp=2,tp=2,zero=3,replicas=2"),
        (pipeline_mains.train, "pp=1,dp=1", "pp=2,dp=2,zero=1,replicas=2,schedule=zbv,virtual=2"),
        (pipeline_mains.train, "pp=1,dp=1", "pp=2,dp=4,zero=3,replicas=2,schedule=interleaved,virtual=2"),
        (numeric_mains.train_bf16, "pp=1,dp=1", "pp=1,dp=4,zero=1,replicas=2"),
        (numeric_mains.train_bf16, "pp=1,dp=1", "pp=2,dp=2,zero=3,replicas=2"),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_replicas_work_with_all_other_options(main: Callable[[Run], Any], one: str, layout: str) -> None:
    """Tensor parallelism, schedules that split the backward pass, and bf16 over fp32 sums."""
    alone, many = (finished(run_world(main, Orders(layout=Layout.parse(text)))) for text in (one, layout))
    assert {repr(report.result) for report in many} == {repr(alone[0].result)}


@pytest.fixture(scope="module")
def losses() -> list[float]:
    """The losses of one rank under the fast reduction."""
    result: list[float] = finished(run_world(mains.train_fast, Orders(layout=Layout(pp=1, dp=1))))[0].result
    return result


@pytest.mark.parametrize(
    "layout",
    [
        Layout(pp=1, dp=2, zero=1),
        Layout(pp=1, dp=4, replicas=2, zero=2),
        pytest.param(Layout(pp=2, dp=2, replicas=2, zero=1), marks=pytest.mark.slow),
        pytest.param(Layout(pp=1, dp=4, replicas=4, zero=3), marks=pytest.mark.slow),
    ],
    ids=Layout.request,
)
def test_the_fast_reduction_agrees_up_to_rounding(losses: list[float], layout: Layout) -> None:
    """Summing locally, each round, or over replicas: no promise of bits, but the same training."""
    assert finished(run_world(mains.train_fast, Orders(layout=layout)))[0].result == pytest.approx(losses, rel=1e-4)


@pytest.mark.parametrize(
    ("compress", "layout", "tolerance"),
    [
        ("bf16", Layout(pp=1, dp=4, replicas=2, zero=1), 2e-2),
        pytest.param("bf16", Layout(pp=1, dp=3, zero=3), 2e-2, marks=pytest.mark.slow),
        ("fp16", Layout(pp=1, dp=2, zero=2), 1e-2),
    ],
    ids=str,
)
def test_compressed_gradients_train(losses: list[float], compress: str, layout: Layout, tolerance: float) -> None:
    """Fewer bytes on the wire cost accuracy, but not the training; every rank sees the same losses."""
    reports = finished(run_world(partial(mains.train_fast, compress=compress), Orders(layout=layout)))
    assert reports[0].result == pytest.approx(losses, rel=tolerance)
    assert reports[0].result != losses
    assert {tuple(report.result) for report in reports} == {tuple(reports[0].result)}


@pytest.mark.parametrize(
    "layout",
    [
        Layout(pp=1, dp=4, replicas=2, zero=2),
        pytest.param(Layout(pp=2, dp=2, replicas=2, zero=1), marks=pytest.mark.slow),
    ],
    ids=Layout.request,
)
def test_powersgd_begins_after_two_whole_exchanges(layout: Layout) -> None:
    """The first two steps are exact to rounding; the third's gradient is of low rank, and still trains."""
    wide = partial(mains.train_fast, width=32)
    whole = finished(run_world(wide, Orders(layout=Layout(pp=1, dp=1))))[0].result
    low = finished(run_world(partial(wide, compress="powersgd"), Orders(layout=layout)))[0].result
    assert low[:3] == pytest.approx(whole[:3], rel=1e-4)
    assert low[3] != pytest.approx(whole[3], rel=1e-4)
    assert low[3] < low[2]


@pytest.mark.parametrize(
    ("compress", "layout"),
    [
        (None, Layout(pp=1, dp=2, zero=2)),
        ("bf16", Layout(pp=1, dp=2, zero=3)),
        ("powersgd", Layout(pp=1, dp=2, replicas=2, zero=1)),
    ],
    ids=str,
)
def test_what_is_unfrozen_in_the_run_is_trained_by_fast_sums_too(compress: str | None, layout: Layout) -> None:
    """From the very step on, a part of a unit and a whole one."""
    for report in finished(run_world(partial(mains.thaw_fast, compress=compress), Orders(layout=layout))):
        assert report.result
        assert set(map(tuple, report.result.values())) == {(False, False, True, True, True)}


def test_powersgd_without_replicas_is_refused() -> None:
    """It compresses what replicas exchange; the error names a layout that has some."""
    reports = run_world(partial(mains.train_fast, compress="powersgd"), Orders(layout=Layout(pp=1, dp=2)))
    assert {report.ended for report in reports} == {"raised"}
    assert "compresses what replicas exchange" in reports[0].error
    assert "use Layout(replicas=2)" in reports[0].error


@pytest.mark.parametrize(
    ("reduction", "compress", "message"),
    [
        ("orderly", None, 'must be "ordered" or "fast"; it is \'orderly\''),
        ("fast", "int8", 'must be one of "bf16", "fp16", "powersgd", or None; it is \'int8\''),
        ("ordered", "bf16", 'choose reduction="fast" with it, or leave compress out'),
    ],
)
def test_impossible_reductions_are_refused_at_once(reduction: str, compress: str | None, message: str) -> None:
    """Unknown words, and rounding where equal bits are promised."""

    def main(run: Run) -> None:
        run.shard(mains.Model, blocks="blocks", reduction=reduction, compress=compress)

    with pytest.raises(UsageError, match=message):
        run_alone(main, threads=1)


@pytest.mark.parametrize(
    ("layout", "precision"),
    [
        ("pp=1,dp=2,zero=2", "fp32"),
        ("pp=1,dp=1", "bf16"),
        pytest.param("pp=1,dp=2,zero=3", "bf16", marks=pytest.mark.slow),
    ],
)
def test_a_block_that_runs_twice_is_refused_by_name(layout: str, precision: str) -> None:
    """Its gradients would be sent when only the second run's are there: no rank sends anything that others do not."""
    orders = Orders(layout=Layout.parse(layout))
    for report in run_world(partial(mains.train_twice, precision=precision), orders):
        assert report.ended == "raised", report.error
        assert "elastic3d.errors.ModelError: module 'blocks.3' runs several times in one forward pass" in report.error
        assert "leave blocks= out" in report.error


def test_blocks_that_run_twice_train_as_one_unit() -> None:
    """What the refusal says keeps the promise."""
    one, two = (
        finished(run_world(partial(mains.train_twice, blocks=None), Orders(layout=Layout(pp=1, dp=dp))))
        for dp in (1, 2)
    )
    assert {report.result for report in two} == {one[0].result}


@pytest.mark.parametrize("layout", ["pp=1,dp=2,zero=2", "pp=1,dp=2,zero=3"])
def test_a_block_that_some_micro_batches_leave_out_is_refused_by_name(layout: str) -> None:
    """A rank says so before it sends anything; another one may be waiting for it by then."""
    reports = run_world(partial(mains.train_twice, build=mains.Skips), Orders(layout=Layout.parse(layout)))
    assert {report.ended for report in reports} <= {"raised", "peer lost"}
    errors = [report.error for report in reports if report.ended == "raised"]
    assert errors
    for error in errors:
        assert "elastic3d.errors.ModelError: block 'blocks." in error
        assert "did not run in a pass of training" in error
        assert "leave blocks= out" in error


def test_a_block_whose_output_some_micro_batches_drop_is_refused_by_name() -> None:
    """Its backward pass ends after those of all others there, and elsewhere among them."""
    orders = Orders(layout=Layout(pp=1, dp=2, zero=2))
    for report in run_world(partial(mains.train_twice, build=mains.Drops), orders):
        assert report.ended == "raised", report.error
        assert "ModelError: what module 'blocks.1' returns is used for some micro-batches of a step" in report.error
        assert report.records == []


@pytest.mark.parametrize(("build", "blocks"), [(mains.Skips, None), (mains.Spares, "blocks")])
def test_blocks_that_are_not_always_used_keep_the_promise(build: Any, blocks: str | None) -> None:
    """As one unit with the model; or as units, where all micro-batches do alike."""
    main = partial(mains.train_twice, build=build, blocks=blocks)
    one, two = (finished(run_world(main, Orders(layout=Layout(pp=1, dp=dp, zero=2)))) for dp in (1, 2))
    assert {report.result for report in two} == {one[0].result}


@pytest.mark.parametrize("build", [mains.Twice, mains.TiedTwice])
def test_a_block_that_runs_twice_is_refused_before_any_rank_joins(build: Any) -> None:
    """Where the model is measured, though it need not be a chain."""
    orders = Orders(layout=Layout(pp=1, dp=1), measuring=True)
    (report,) = run_world(partial(mains.train_twice, build=build), orders)
    assert report.ended == "raised", report.error
    assert "ModelError: module 'blocks.0' runs 2 times in forward" in report.error

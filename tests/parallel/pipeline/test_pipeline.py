"""Every schedule, with several stages per rank and any cuts, ends with the bits of one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from elastic3d.errors import LayoutError
from elastic3d.parallel.numerics.recompute import Recompute
from elastic3d.parallel.pipeline import stages
from elastic3d.planner import schedules
from elastic3d.planner.pipeline_actions import Pass, orders
from elastic3d.training import Run
from elastic3d.values import Layout, Schedule
from tests.parallel import pipeline_mains
from tests.parallel.worlds import Orders, Report, run_world

pytestmark = [pytest.mark.gloo, pytest.mark.long]

ONE = Layout(pp=1, dp=1)


def finished(reports: list[Report]) -> list[Report]:
    for report in reports:
        assert report.ended == "done", report.error
    return reports


def ends_as_one(main: Callable[[Run], str], reference: Report, text: str) -> None:
    reports = finished(run_world(main, Orders(layout=Layout.parse(text))))
    assert {report.result for report in reports} == {reference.result}
    for report in reports:
        mine = [(r.step, r.loss, r.gradient_norm, r.samples, r.sample_sum) for r in report.records]
        assert mine == [(r.step, r.loss, r.gradient_norm, r.samples, r.sample_sum) for r in reference.records]


@pytest.fixture(scope="module")
def reference() -> Report:
    """The run of one rank, which every layout must equal."""
    return finished(run_world(pipeline_mains.train, Orders(layout=ONE)))[0]


@pytest.mark.parametrize(
    "text",
    [
        "pp=2,dp=1,zero=3,schedule=gpipe,cuts=3",
        "pp=2,dp=2,zero=3,schedule=interleaved,virtual=2",
        "pp=2,dp=2,zero=2,schedule=zero-bubble,virtual=2",
        "pp=2,dp=3,zero=2,schedule=zbv,virtual=2,cuts=1/5/6",
        "pp=2,dp=2,zero=2,schedule=dualpipev,virtual=2",
    ],
)
def test_every_schedule_ends_with_one_digest(reference: Report, text: str) -> None:
    """Losses, norms, parameters and AdamW state, with dropout, clipping and parameters used on some micro-batches."""
    ends_as_one(pipeline_mains.train, reference, text)


LEGAL = [
    layout
    for schedule in Schedule
    for pp, dp in ((2, 1), (2, 2), (4, 1))
    for zero in (1, 2, 3)
    if not schedules.problem(
        layout := Layout(pp=pp, dp=dp, zero=zero, schedule=schedule, virtual=schedules.VIRTUAL[schedule][0]),
        blocks=8,
        micro_batches=8,
    )
]


@pytest.mark.slow
@pytest.mark.parametrize("layout", LEGAL, ids=Layout.request)
def test_further_layouts_end_with_the_same_digest(reference: Report, layout: Layout) -> None:
    """All legal ones, in worlds of at most four ranks."""
    ends_as_one(pipeline_mains.train, reference, layout.request())


@pytest.mark.slow
@pytest.mark.parametrize("main", [pipeline_mains.folded, pipeline_mains.recomputing, pipeline_mains.bfloat16])
@pytest.mark.parametrize(
    "text",
    [
        "pp=2,dp=2,zero=3,schedule=interleaved,virtual=3,cuts=1/2/5/6/7",
        "pp=2,dp=1,zero=2,schedule=zero-bubble,virtual=4",
        "pp=2,dp=2,zero=2,schedule=zbv,virtual=2",
        "pp=2,dp=2,zero=2,schedule=dualpipev,virtual=2",
    ],
)
def test_unusual_blocks_end_with_one_digest(main: Callable[[Run], str], text: str) -> None:
    """Views as outputs, a parameter used twice, recomputation in the backward pass, and a narrower dtype."""
    ends_as_one(main, finished(run_world(main, Orders(layout=ONE)))[0], text)


def test_state_moves_between_schedules(reference: Report, tmp_path: Path) -> None:
    """Snapshots of a folded pipeline equal those of any other layout: names do not depend on stages."""
    folded = Layout.parse("pp=2,dp=1,zero=2,schedule=zbv,virtual=2,cuts=1/2/7")
    for report in run_world(pipeline_mains.train, Orders(layout=folded, keep=tmp_path, leave_at={0: 1, 1: 1})):
        assert (report.ended, report.error) == ("left", "2")
    looped = Layout.parse("pp=2,dp=1,schedule=interleaved,virtual=2")
    second = finished(run_world(pipeline_mains.train, Orders(layout=looped, take=tmp_path)))
    assert {report.result for report in second} == {reference.result}


def test_illegal_layouts_are_refused_before_the_first_step() -> None:
    """On every rank and with the reason."""
    for text, reason in [
        ("pp=2,dp=1,zero=3,schedule=zbv,virtual=2", "silently wrong"),
        ("pp=2,dp=1,virtual=2,schedule=interleaved,cuts=1/2", "have 3 cuts between them"),
    ]:
        for report in run_world(pipeline_mains.train, Orders(layout=Layout.parse(text))):
            assert report.ended == "raised"
            assert reason in report.error


def test_selective_recomputation_is_refused_with_a_split_backward_pass() -> None:
    """torch returns its kept products once, and would raise in the middle of a step."""
    for schedule in Schedule:
        layout = Layout(pp=2, dp=2, zero=2, schedule=schedule, virtual=schedules.VIRTUAL[schedule][0])
        stages.check_recompute(layout, Recompute.FULL)
        if schedule.splits_backward:
            with pytest.raises(LayoutError, match='use recompute="full"'):
                stages.check_recompute(layout, Recompute.SELECTIVE)
        else:
            stages.check_recompute(layout, Recompute.SELECTIVE)


@pytest.mark.parametrize("schedule", Schedule)
def test_gradients_of_a_stage_are_complete_in_the_order_of_micro_batches(schedule: Schedule) -> None:
    """Otherwise the ordered reduction would have to buffer; other tests compare these orders with torch's."""
    for pp in (2, 3, 4, 8):
        for rounds in (8, 16, 24, 17):
            layout = Layout(pp=pp, dp=1, zero=2, schedule=schedule, virtual=schedules.VIRTUAL[schedule][0])
            if schedules.problem(layout, blocks=32, micro_batches=rounds):
                continue
            for rank, actions in enumerate(orders(schedule, pp=pp, rounds=rounds, virtual=layout.virtual)):
                for stage in schedules.stages_of_rank(layout, rank):
                    done = [
                        action.micro_batch
                        for action in actions
                        if action.stage == stage and action.kind in (Pass.BACKWARD, Pass.WEIGHT)
                    ]
                    assert done == list(range(rounds))


def test_blocks_in_a_dictionary_end_as_one() -> None:
    """Stages and shards are made of them as of a list."""
    reference = finished(run_world(pipeline_mains.named, Orders(layout=ONE)))[0]
    ends_as_one(pipeline_mains.named, reference, "pp=2,dp=2,zero=3,schedule=1f1b")


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_what_a_block_raises_is_told_as_it_is(where: str) -> None:
    """Not as torch's error around it, of another class and with an empty first line."""
    reports = run_world(partial(pipeline_mains.failing, where), Orders(layout=Layout(pp=2, dp=1)))
    raised = [report.error for report in reports if report.ended == "raised"]
    assert {text.strip().splitlines()[-1] for text in raised} == {f"ValueError: of the block's {where}"}, reports
    assert not any("failed to run" in text or "Failed to run" in text for text in raised)


def test_an_optimizer_of_one_stage_has_an_empty_group_on_the_others() -> None:
    """As the guide says to write it: the same group on every stage, with the same bits as on one rank."""
    digests = {
        report.result
        for text in ("pp=1,dp=1", "pp=2,dp=1")
        for report in finished(run_world(pipeline_mains.train_head, Orders(layout=Layout.parse(text))))
    }
    assert len(digests) == 1

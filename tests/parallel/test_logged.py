"""Numbers that scripts log, metrics over the ranks, and runs that scripts end, on real ranks."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import pytest
import torch

from elastic3d.values import Layout
from tests.parallel import logged_mains
from tests.parallel.worlds import Orders, Report, run_world

pytestmark = pytest.mark.gloo


def ended(reports: list[Report]) -> list[Report]:
    for report in reports:
        assert report.ended == "done", report.error
    return reports


@pytest.mark.parametrize("layout", [Layout(pp=1, dp=2), Layout(pp=2, dp=1)], ids=str)
def test_what_ranks_log_is_one_number_by_name_on_every_rank(layout: Layout) -> None:
    """By each reduction, though some ranks log it, in some steps; and no bit of the training depends on it.

    A name costs one gather, of two exchanges, when it is new, and none later.
    """
    reports = ended(run_world(logged_mains.log_all_kinds, Orders(layout=layout)))
    digests = {report.result for report in ended(run_world(logged_mains.log_nothing, Orders(layout=layout)))}
    always = {"rate": 0.1, "rank": 0.5, "eval/sum": 2.0, "high": 1.0, "last": 10.0}
    for report in reports:
        assert len(report.records) == logged_mains.STEPS
        for step, record in enumerate(report.records):
            logged = dict(record.logged)
            assert math.isnan(logged.pop("odd"))
            assert logged.pop("late", None) == (math.inf if step == 2 else None)
            assert logged == {**always, "one": step}
        assert list(report.records[-1].logged) == list(reports[0].records[-1].logged)
    assert [report.result[1] for report in reports] == [[2, 0, 2, 0]] * 2
    assert {report.result[0] for report in reports} == digests


@pytest.mark.parametrize("layout", [Layout(pp=1, dp=1), Layout(pp=1, dp=2), Layout(pp=2, dp=1)], ids=str)
def test_the_last_step_has_what_is_logged_after_it(layout: Layout) -> None:
    """Such as an evaluation of what it leaves. It waits for that where something of the script's own is kept anyway."""
    ranks = range(layout.world)
    for report in ended(run_world(logged_mains.log_after_the_last, Orders(layout=layout))):
        *others, last = (dict(record.logged) for record in report.records)
        assert others == [{"rank": sum(ranks) / len(ranks), "before": 1.0}] * (logged_mains.STEPS - 1)
        late = {"eval/loss": 0.25} if layout.world > 1 else {}
        assert last == {"rank": 2 + sum(ranks) / len(ranks), "before": 1.0, **late}


def test_a_name_that_ranks_reduce_in_two_ways_is_refused_on_all_of_them() -> None:
    """None is left waiting for another."""
    for report in run_world(logged_mains.log_unlike, Orders(layout=Layout(pp=1, dp=2))):
        assert report.ended == "raised"
        assert "'x' was given with reduce='max' and with reduce='mean'" in report.error


@pytest.mark.parametrize("layout", [Layout(pp=1, dp=2), Layout(pp=2, dp=1)], ids=str)
def test_one_rank_ends_the_run_of_all(layout: Layout, tmp_path: Path) -> None:
    """After the same step, with the reason in the ledger; who goes on from that state makes no more steps."""
    orders = Orders(layout=layout, keep=tmp_path, snapshot_every=1)
    for report in ended(run_world(logged_mains.stop_on_one, orders)):
        assert report.result == 3
        assert [record.stopped for record in report.records] == ["", "", "it is good enough"]
        assert report.records[-1].until == 3
    later = Orders(layout=layout, take=tmp_path)
    for report in ended(run_world(logged_mains.stop_on_one, later)):
        assert (report.result, report.restored and report.restored[1], report.records) == (3, 3, [])
    # From memory it is the same job, which has ended, whatever its script accepts of a checkpoint.
    for report in ended(run_world(partial(logged_mains.stop_on_one, accept="stop"), later)):
        assert report.result == 3


@pytest.mark.parametrize("dp", [1, 2])
def test_metrics_are_reduced_over_the_ranks(dp: int) -> None:
    """Whole numbers exactly, equal floats to themselves, tensors by number; kinds that differ are refused by all."""
    reports = ended(run_world(logged_mains.reduce_over_ranks, Orders(layout=Layout(pp=1, dp=dp))))
    values = torch.tensor([[rank + 0.1, -1.0] for rank in range(dp)])
    for report in reports:
        number, mean, most, total, middle, high, low, whole, dtype, *refused = report.result
        assert (number, mean, most) == (dp * (dp + 1) // 2, 0.1, (dp - 1) / 2)
        assert isinstance(number, int)
        assert torch.equal(total, values.double().sum(0).float())
        assert torch.equal(middle, values.double().mean(0).float())
        assert torch.equal(high, values.amax(0))
        assert torch.equal(low, values.amin(0))
        assert int(whole) == dp << 60
        assert dtype == torch.bfloat16
        if dp > 1:
            assert "rank 0 gave a tensor of torch.float32 and shape [1]" in refused[0]
    assert all(str(report.result) == str(reports[0].result) for report in reports)

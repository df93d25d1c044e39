"""Numbers that are not finite: what they come from is left out, in any layout, and whoever invents them is named."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from elastic3d.data.holes import Holes, length
from elastic3d.port import Audited
from elastic3d.rollback import Rollback
from elastic3d.values import Layout, Schedule
from tests.parallel import unsound_mains as mains
from tests.parallel.unsound_mains import GRADIENT, LOSS, Made, Sick
from tests.parallel.worlds import Orders, Report, run_world

pytestmark = pytest.mark.gloo

ALONE = Layout(pp=1, dp=1)
THREE = Layout(pp=1, dp=3, zero=3)
BOTH = ((5, LOSS), (20, GRADIENT), (30, LOSS))
STAYS = 99


def finished(reports: list[Report]) -> Made:
    for report in reports:
        assert report.ended == "done", report.error
        assert report.audits == reports[0].audits, "all ranks judge alike"
        assert report.result == reports[0].result
    made: Made = reports[0].result
    return made


def left_out(reports: list[Report]) -> Holes:
    """Return the positions that were left out, as the records of the steps say."""
    return tuple(part for record in reports[0].records for part in record.excluded)


@cache
def oracle(exclude: Holes, **how: Any) -> str:
    """Return the digest of one rank's run that knows the holes from its beginning, and looks at nothing."""
    main = partial(mains.train, exclude=exclude, **how)
    return finished(run_world(main, Orders(layout=ALONE))).digest


LAYOUTS = [
    (Layout(pp=2, dp=2, zero=2, schedule=Schedule.ZERO_BUBBLE, virtual=2), 1),
    pytest.param(ALONE, 1, marks=pytest.mark.long),
    pytest.param(Layout(pp=1, dp=2, zero=3), 1, marks=pytest.mark.long),
    pytest.param(Layout(pp=2, dp=1), 1, marks=pytest.mark.long),
    pytest.param(Layout(pp=2, dp=2, zero=3), 2, marks=pytest.mark.long),
    pytest.param(Layout(pp=1, dp=4, zero=3, replicas=2), 1, marks=pytest.mark.slow),
    pytest.param(Layout(pp=2, dp=1, zero=2, schedule=Schedule.ZERO_BUBBLE, virtual=2), 2, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("layout", "leaf"), LAYOUTS, ids=str)
def test_the_step_is_made_without_what_is_not_finite(layout: Layout, leaf: int) -> None:
    """With the bits of a quiet run that had the same holes from its beginning; nothing shifts, nothing is lost."""
    main = partial(mains.train, marks=BOTH, leaf=leaf)
    reports = run_world(main, Orders(layout=layout, numerics="skip"))
    made, holes = finished(reports), left_out(reports)
    assert made.holes == holes
    assert made.account == (48 - length(holes), length(holes))
    assert len(holes) >= 3
    assert not any(made.skipped)
    assert reports[0].audits == []
    assert made.digest == oracle(holes, marks=BOTH, leaf=leaf)


@pytest.mark.long
def test_a_state_knows_its_holes(tmp_path: Path) -> None:
    """A run that goes on under another layout, in the middle, ends with the same bits, and accounts for all of it."""
    main = partial(mains.train, marks=BOTH)
    how: dict[str, Any] = {"numerics": "skip", "spike": "log"}
    orders = Orders(layout=THREE, snapshot_every=1, keep=tmp_path, leave_at=dict.fromkeys(range(3), 1), **how)
    reports = run_world(main, orders)
    assert {report.ended for report in reports} == {"left"}, reports[0].error
    before = left_out(reports)
    reports = run_world(main, Orders(layout=Layout(pp=2, dp=1), take=tmp_path, **how))
    made = finished(reports)
    assert before
    assert len(made.losses) == mains.STEPS
    assert made.holes == (*before, *left_out(reports))
    assert made.digest == oracle(made.holes, marks=BOTH)


def test_a_device_that_errs_once_leaves_no_hole() -> None:
    """The passes are made again, the rank's node is named, and no bit of the run is wrong."""
    main = partial(mains.train, sick=[Sick(rank=1)])
    reports = run_world(main, Orders(layout=THREE, numerics="skip"))
    made = finished(reports)
    (redone,) = reports[0].audits
    assert (redone.kind, redone.step, redone.nodes) == (Audited.REDONE, 1, ("node1",))
    assert made.holes == ()
    assert made.digest == oracle(())


@pytest.mark.long
def test_a_device_that_errs_twice_is_heard() -> None:
    """It says so of its own micro-batches again, and is alone with that in the hearing that follows."""
    main = partial(mains.train, sick=[Sick(rank=1, passes=3)])
    reports = run_world(main, Orders(layout=THREE, numerics="skip"))
    made = finished(reports)
    assert [(one.kind, one.finding, one.ranks) for one in reports[0].audits] == [
        (Audited.FAILED, "transient", (1,)),
        (Audited.REDONE, "transient", (1,)),
    ]
    assert made.digest == oracle(())


def test_a_device_that_always_errs_is_convicted_and_leaves_no_hole() -> None:
    """No update is made of what it came to."""
    main = partial(mains.train, sick=[Sick(rank=1, passes=STAYS)])
    reports = run_world(main, Orders(layout=THREE, numerics="skip"))
    assert {report.ended for report in reports} == {"convicted"}, reports[0].error
    for report in reports:
        assert [record.step for record in report.records] == [1]
        verdict = report.audits[-1]
        assert (verdict.kind, verdict.ranks, verdict.step, verdict.clean) == (Audited.LYING, (1,), 1, 1)


@pytest.mark.long
def test_a_run_that_is_to_stop_says_what_for() -> None:
    """Step, micro-batch and samples, and that trying again does not help."""
    main = partial(mains.train, marks=BOTH)
    reports = run_world(main, Orders(layout=Layout(pp=1, dp=2), numerics="stop"))
    assert {report.ended for report in reports} == {"raised"}
    assert "NotFinite: step 0: the loss or the gradient of micro-batch" in reports[0].error
    assert "samples" in reports[0].error


@pytest.mark.long
def test_a_step_of_which_nothing_is_left_is_skipped() -> None:
    """The optimizer does not move; and where no step has anything left, it is not the data, and the run ends."""
    main = partial(mains.train, marks=tuple((sample, LOSS) for sample in range(37)), steps=13)
    reports = run_world(main, Orders(layout=Layout(pp=1, dp=2), numerics="skip"))
    assert {report.ended for report in reports} == {"raised"}
    assert "for more than 10 steps in a row" in reports[0].error
    assert [record.excluded for record in reports[0].records] == [((12 * step, 12 * step + 12),) for step in range(10)]


@pytest.mark.long
@pytest.mark.parametrize("how", [{"clip": None}, {"precision": "bf16"}, {"precision": "fp16"}], ids=str)
def test_it_is_so_without_clipping_and_in_16_bits(how: dict[str, Any]) -> None:
    """In fp16 only losses tell: gradients may overflow, for which the loss scale comes down."""
    marks = ((5, LOSS), (30, LOSS))
    reports = run_world(partial(mains.train, marks=marks, **how), Orders(layout=Layout(pp=1, dp=2), numerics="skip"))
    made, holes = finished(reports), left_out(reports)
    assert len(holes) >= 2
    assert made.digest == oracle(holes, marks=marks, **how)


@pytest.mark.long
def test_every_layout_goes_back_alike_and_an_audited_one_to_what_was_vouched_for(tmp_path: Path) -> None:
    """What is left out is the same; the state may be an older one, since the spike may be a device's doing."""
    main = partial(mains.train_spiking, first=40)
    (first,) = run_world(partial(main, steps=20), Orders(layout=ALONE, keep=tmp_path, spike="log", snapshot_every=5))
    assert first.result == 20, first.error
    back = Rollback(before=3, step=33, spike=42, first=33 * 12, stop=43 * 12)
    for layout, audit, clean in ((Layout(pp=2, dp=1), 0.0, 33), (Layout(pp=1, dp=2), 0.001, 20)):
        reports = run_world(
            partial(main, steps=50), Orders(layout=layout, take=tmp_path, spike="rollback", audit=audit)
        )
        assert [report.ended for report in reports] == ["convicted"] * 2, reports[0].error
        said = [one for report in reports for one in report.audits if one.kind is Audited.SPIKED]
        assert [(one.rollback, one.clean) for one in said] == [(back, clean)] * 2

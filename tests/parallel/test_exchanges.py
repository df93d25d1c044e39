"""What ranks exchange in audited steps is looked at: who spoils it is named before the update, and nobody else."""

from __future__ import annotations

from functools import cache, partial

import pytest

from elastic3d.port import Audited
from elastic3d.values import Layout, Schedule
from tests.parallel import exchanged_mains as mains
from tests.parallel.exchanged_mains import Wrong
from tests.parallel.worlds import Orders, Report, run_world

pytestmark = pytest.mark.gloo

THREE, FOUR = Layout(pp=1, dp=3, zero=3), Layout(pp=1, dp=4, zero=2)
ALWAYS = 1 << 30


def played(*wrong: Wrong, layout: Layout = THREE, steps: int = mains.STEPS, audit: float = 1.0) -> list[Report]:
    return run_world(partial(mains.train, wrong=wrong, steps=steps), Orders(layout=layout, audit=audit))


def finished(reports: list[Report]) -> str:
    assert [report.ended for report in reports] == ["done"] * len(reports), [report.error for report in reports]
    for report in reports:
        assert report.audits == reports[0].audits, "all ranks judge alike"
    assert len({report.result for report in reports}) == 1
    digest: str = reports[0].result
    return digest


@cache
def quiet(steps: int = mains.STEPS) -> str:
    """Return the digest of one rank's run, which nobody audits."""
    return finished(played(layout=Layout(pp=1, dp=1), steps=steps, audit=0.0))


def said(report: Report) -> list[tuple[Audited, int, tuple[int, ...]]]:
    return [(audit.kind, audit.step, audit.ranks) for audit in report.audits]


def test_what_goes_wrong_once_between_ranks_is_made_again() -> None:
    """A pair of ranks for the wire, the rank that holds other weights, and the one that adds wrongly; no bit stays."""
    reports = played(
        Wrong(rank=2, what="wire", sender=0, step=1),
        Wrong(rank=1, what="gather", sender=0, step=2),
        Wrong(rank=0, what="fold", step=3, times=15),
    )
    assert finished(reports) == quiet()
    assert said(reports[0]) == [
        *((Audited.FAILED, 1, (0, 2)), (Audited.REDONE, 1, (0, 2))),
        *((Audited.FAILED, 2, (1,)), (Audited.REDONE, 2, (1,))),
        *((Audited.FAILED, 3, (0,)), (Audited.REDONE, 3, (0,))),
    ]
    assert all(len(audit.parts) == len(reports) and audit.seconds > 0 for audit in reports[0].audits)


@pytest.mark.long
def test_a_rank_that_adds_wrongly_again_is_convicted() -> None:
    """By all others, before the update of the step in which it began."""
    reports = played(Wrong(rank=2, what="fold", times=ALWAYS), layout=FOUR)
    assert {report.ended for report in reports} == {"convicted"}, reports[0].error
    for report in reports:
        assert said(report) == [(Audited.FAILED, 1, (2,)), (Audited.LYING, 1, (2,))]
        assert [record.step for record in report.records] == [1]


@pytest.mark.long
def test_a_rank_whose_links_all_fail_is_convicted_the_second_time() -> None:
    """The first time it is an accident of some pairs; three others at the other ends say the second time whose."""
    reports = played(Wrong(rank=1, what="wire", times=ALWAYS), layout=FOUR)
    assert {report.ended for report in reports} == {"convicted"}, reports[0].error
    for report in reports:
        first, _, again, lying = report.audits
        assert [one.kind for one in report.audits] == [Audited.FAILED, Audited.REDONE, Audited.FAILED, Audited.LYING]
        assert (first.finding, again.finding, lying.ranks) == ("transient", "persistent", (1,))
        assert 1 in first.ranks


@pytest.mark.slow
def test_one_link_that_always_fails_has_nobody_convicted() -> None:
    """Which of its ends it is nobody can tell: that is said, and training goes on."""
    reports = played(Wrong(rank=1, what="wire", sender=0, times=ALWAYS), layout=Layout(pp=1, dp=2, zero=2), steps=2)
    assert {report.ended for report in reports} == {"done"}
    kinds = [audit.kind for audit in reports[0].audits]
    assert kinds == [Audited.FAILED, Audited.REDONE] * 3 + [Audited.FAILED, Audited.INCONCLUSIVE]
    assert {audit.ranks for audit in reports[0].audits if audit.kind is Audited.FAILED} == {(0, 1)}


@pytest.mark.slow
def test_a_script_that_writes_to_gathered_weights_is_no_broken_memory() -> None:
    """That is said once, and nobody is named."""
    reports = played(Wrong(rank=0, what="script", times=ALWAYS))
    assert {report.ended for report in reports} == {"done"}, reports[0].error
    assert [(audit.kind, audit.where) for audit in reports[0].audits] == [(Audited.UNCHECKED, "gathered weights")]


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(Layout(pp=1, dp=3, zero=3), marks=pytest.mark.long),
        pytest.param(Layout(pp=2, dp=2, zero=2, schedule=Schedule.ZERO_BUBBLE, virtual=2), marks=pytest.mark.slow),
        pytest.param(Layout(pp=1, dp=4, zero=3, replicas=2), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_fifty_audited_steps_name_nobody(layout: Layout) -> None:
    """And change no bit."""
    reports = played(layout=layout, steps=50)
    assert finished(reports) == quiet(50)
    assert reports[0].audits == []

"""State at rest, votes and updates are checked without changing a bit, and who is wrong is named before it spreads."""

from __future__ import annotations

from functools import cache, partial

import pytest

from elastic3d.port import Audited, AuditReport
from elastic3d.values import Layout, Schedule
from tests.parallel import checked_mains as mains
from tests.parallel.checked_mains import Wrong
from tests.parallel.worlds import Orders, Report, run_world

pytestmark = pytest.mark.gloo

THREE = Layout(pp=1, dp=3, zero=3)
MOST = 1.0
"""Share of the time that lets all of the small state be looked at in each step."""


def played(
    layout: Layout = THREE,
    *,
    at_rest: float = MOST,
    wrong: Wrong | None = None,
    steps: int = 4,
    leave: int = -1,
    every: int = 1,
) -> list[Report]:
    leaving = dict.fromkeys(range(layout.world), leave) if leave >= 0 else {}
    orders = Orders(layout=layout, at_rest=at_rest, leave_at=leaving, snapshot_every=1)
    return run_world(partial(mains.train, wrong=wrong, steps=steps, every=every), orders)


def finished(reports: list[Report]) -> str:
    assert [report.ended for report in reports] == ["done"] * len(reports), reports[0].error
    assert len({report.result for report in reports}) == 1
    digest: str = reports[0].result
    return digest


def said(report: Report) -> list[AuditReport]:
    return [audit for audit in report.audits if audit.kind is not Audited.UNCHECKED]


@cache
def quiet() -> str:
    """Return the digest of one rank's run without checks."""
    return finished(played(Layout(pp=1, dp=1), at_rest=0.0))


@pytest.mark.parametrize(
    "layout",
    [
        THREE,
        pytest.param(Layout(pp=2, dp=2, zero=2, schedule=Schedule.ZERO_BUBBLE, virtual=2), marks=pytest.mark.long),
        pytest.param(Layout(pp=1, dp=4, zero=3, replicas=2), marks=pytest.mark.slow),
        pytest.param(Layout(pp=1, dp=1), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_checks_change_no_bit_and_are_silent(layout: Layout) -> None:
    """Every update is computed again in part, all of the state is looked at, and nobody is named."""
    reports = played(layout)
    assert finished(reports) == quiet()
    assert [said(report) for report in reports] == [[]] * len(reports)


@pytest.mark.parametrize(
    ("what", "layout"),
    [
        pytest.param("rest", THREE, id="parameter"),
        pytest.param("state", THREE, id="optimizer", marks=pytest.mark.long),
        pytest.param("rest", Layout(pp=2, dp=1), id="stage"),
    ],
)
def test_a_bit_that_changes_at_rest_is_found_before_the_vote(what: str, layout: Layout) -> None:
    """In the very step, by the rank itself, which does not vote on it: nobody makes it with what was computed so."""
    # Updates are not checked in these steps: with them, others would hear of it before they have recorded theirs.
    reports = played(layout, wrong=Wrong(rank=1, what=what), every=1000)
    assert reports[1].ended == "convicted", reports[1].error
    (report,) = said(reports[1])
    assert (report.kind, report.step, report.ranks, report.nodes) == (Audited.ALTERED, 2, (1,), ("node1",))
    assert ("exp_avg_sq" in report.where) == (what == "state")
    assert "1 bit of" in report.detail
    assert [[record.step for record in one.records] for one in reports] == [[1, 2]] * layout.world
    assert {one.ended for one in reports if one is not reports[1]} <= {"peer lost", "crashed"}
    assert not said(reports[0])


@pytest.mark.long
def test_a_script_that_writes_to_its_parameters_is_no_broken_memory() -> None:
    """That is said once, and nobody is named: its state at rest is not looked at any more."""
    reports = played(Layout(pp=1, dp=1), wrong=Wrong(rank=0, what="script"))
    assert reports[0].ended == "done", reports[0].error
    assert not said(reports[0])
    assert [audit.where for audit in reports[0].audits].count("state at rest") == 1


def test_a_rank_that_leaves_a_vote_with_another_outcome_is_named() -> None:
    """In the next vote, before the next update: what was made with it is not gone on from."""
    reports = played(wrong=Wrong(rank=2, what="vote"))
    for report in reports:
        assert report.ended == "convicted", report.error
        (split,) = said(report)
        assert (split.kind, split.ranks, split.nodes) == (Audited.SPLIT, (2,), ("node2",))
        assert (split.step, split.clean) == (2, 2)
        assert [record.step for record in report.records] == [1, 2, 3]


@pytest.mark.parametrize(
    ("what", "kind"),
    [("vote", Audited.SPLIT), pytest.param("update", Audited.MISCALCULATED, marks=pytest.mark.long)],
)
def test_what_goes_wrong_as_all_leave_is_not_handed_on(what: str, kind: Audited) -> None:
    """There is no vote after it in this generation: all compare once more, before the state is anybody else's."""
    reports = played(wrong=Wrong(rank=1, what=what), leave=2)
    for report in reports:
        assert report.ended == "convicted", report.error
        (wrong,) = said(report)
        assert (wrong.kind, wrong.ranks, wrong.step, wrong.clean) == (kind, (1,), 2, 2)
        assert [record.step for record in report.records] == [1, 2]


@pytest.mark.parametrize(
    ("what", "kind"),
    [("vote", Audited.SPLIT), pytest.param("update", Audited.MISCALCULATED, marks=pytest.mark.long)],
)
def test_what_goes_wrong_in_the_last_step_is_not_what_the_run_ends_with(what: str, kind: Audited) -> None:
    """Nothing comes after it that would tell: all compare once more, before the state is stored as the run's."""
    reports = played(wrong=Wrong(rank=1, what=what), steps=3)
    for report in reports:
        assert report.ended == "convicted", report.error
        (wrong,) = said(report)
        assert (wrong.kind, wrong.ranks, wrong.step, wrong.clean) == (kind, (1,), 2, 2)
        assert [record.step for record in report.records] == [1, 2]


@pytest.mark.long
def test_two_ranks_that_part_name_nobody() -> None:
    """Which of the two is wrong nobody can say; that they part is said once."""
    reports = played(Layout(pp=1, dp=2, zero=2), wrong=Wrong(rank=1, what="vote"))
    for report in reports:
        assert report.ended == "done", report.error
        kinds = [(audit.kind, audit.ranks, audit.acted) for audit in said(report)]
        assert kinds[0] == (Audited.SPLIT, (), False)
        assert [kind for kind, _, _ in kinds].count(Audited.SPLIT) == 1


def test_an_update_that_comes_to_other_bits_elsewhere_is_found() -> None:
    """All ranks repeat the piece before the next update, and what the wrong one made is not gone on from."""
    reports = played(wrong=Wrong(rank=1, what="update"))
    for report in reports:
        assert report.ended == "convicted", report.error
        (wrong,) = said(report)
        assert (wrong.kind, wrong.finding, wrong.ranks) == (Audited.MISCALCULATED, "transient", (1,))
        assert (wrong.step, wrong.clean, wrong.acted) == (2, 2, True)


@pytest.mark.long
def test_who_repeats_an_update_wrongly_once_harms_nobody() -> None:
    """No state is wrong: it is said, and training goes on to the bits of a quiet run."""
    reports = played(wrong=Wrong(rank=0, what="again"))
    assert finished(reports) == quiet()
    for report in reports:
        (wrong,) = said(report)
        assert (wrong.kind, wrong.ranks, wrong.acted) == (Audited.MISCALCULATED, (0,), False)


def test_updates_that_nobody_can_make_again_are_told() -> None:
    """A rank alone has nobody else: that is said at the start, once, and nobody is named."""
    (report,) = played(Layout(pp=1, dp=1))
    finished([report])
    (told,) = report.audits
    assert (told.kind, told.where, told.ranks) == (Audited.UNCHECKED, "updates", ())
    assert "no other node" in told.detail

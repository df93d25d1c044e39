"""Audits change no bit, and find the rank that computes wrongly before its numbers get into the weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest

from elastic3d.port import Audited
from elastic3d.training import Run
from elastic3d.values import Layout, Schedule
from tests.parallel import audited_mains as mains
from tests.parallel.audited_mains import Flip
from tests.parallel.worlds import Orders, Report, run_world

pytestmark = pytest.mark.gloo

THREE = Layout(pp=1, dp=3, zero=3)
STAYS = 99
"""Passes of a fault that stays: more than there are."""


def played(main: Callable[[Run], Any], layout: Layout = THREE, audit: float = 1.0) -> list[Report]:
    return run_world(main, Orders(layout=layout, audit=audit))


def finished(reports: list[Report]) -> Report:
    for report in reports:
        assert report.ended == "done", report.error
        assert report.audits == reports[0].audits, "all ranks judge alike"
    assert len({report.result for report in reports}) == 1
    return reports[0]


@cache
def quiet(**how: Any) -> str:
    """Return the digest of one rank's run without faults, which nobody audits."""
    digest: str = finished(played(partial(mains.train, **how), Layout(pp=1, dp=1), audit=0.0)).result
    return digest


@pytest.mark.parametrize(
    ("layout", "leaf"),
    [
        (Layout(pp=2, dp=2, zero=2, schedule=Schedule.ZERO_BUBBLE, virtual=2), 1),
        pytest.param(Layout(pp=2, dp=2, zero=3), 1, marks=pytest.mark.long),
        pytest.param(Layout(pp=2, dp=2, zero=2, schedule=Schedule.GPIPE), 1, marks=pytest.mark.slow),
        pytest.param(Layout(pp=2, dp=2, zero=2, schedule=Schedule.DUALPIPE_V, virtual=2), 1, marks=pytest.mark.slow),
        pytest.param(Layout(pp=2, dp=2, zero=3, schedule=Schedule.INTERLEAVED, virtual=2), 1, marks=pytest.mark.slow),
        pytest.param(Layout(pp=1, dp=4, zero=3, replicas=2), 1, marks=pytest.mark.long),
        pytest.param(Layout(pp=1, dp=2, zero=1), 2, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_audits_change_no_bit(layout: Layout, leaf: int) -> None:
    """Every step is audited, all ranks agree each time, and the state is that of a run without audits."""
    report = finished(played(partial(mains.train, leaf=leaf), layout))
    assert report.result == quiet(leaf=leaf)
    assert report.audits == []


ACCIDENTS = {
    "on the way forward": Flip(rank=1, what="output", block=2),
    "on the way back": Flip(rank=1, what="input", block=2),
    "in a weight's gradient": Flip(rank=1, what="weight", block=2),
    "of an auditor": Flip(rank=1, what="output", skip=1),
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.long) for name in ACCIDENTS])
def test_what_went_wrong_once_is_made_again(name: str) -> None:
    """The rank is named, the step's passes are made again before its update, and no bit of the run is wrong."""
    report = finished(played(partial(mains.train, micro_batches=3, flips=[ACCIDENTS[name]])))
    assert [audit.kind for audit in report.audits] == [Audited.FAILED, Audited.REDONE]
    failed, _ = report.audits
    assert (failed.step, failed.ranks, failed.nodes, failed.finding) == (1, (1,), ("node1",), "transient")
    if name == "in a weight's gradient":
        assert failed.where == "blocks.2"
    assert report.result == quiet(micro_batches=3)


@pytest.mark.parametrize(
    ("flips", "dp"),
    [
        ((Flip(rank=1, passes=STAYS),), 3),
        pytest.param(
            (Flip(rank=1, passes=STAYS), Flip(rank=2, passes=STAYS, what="weight", fresh=True)),
            4,
            marks=pytest.mark.long,
        ),
    ],
    ids=["one", "two"],
)
def test_a_device_that_computes_wrongly_again_is_convicted(flips: tuple[Flip, ...], dp: int) -> None:
    """In the step in which it began, and no rank makes that step's update: whoever is honest goes free."""
    reports = played(partial(mains.train, micro_batches=dp, flips=flips), Layout(pp=1, dp=dp, zero=2))
    assert {report.ended for report in reports} == {"convicted"}, reports[0].error
    for report in reports:
        assert [record.step for record in report.records] == [1]
        assert [audit.kind for audit in report.audits] == [Audited.FAILED, Audited.LYING]
        verdict = report.audits[-1]
        assert (verdict.step, verdict.clean) == (1, 0)
        assert verdict.ranks
        assert set(verdict.ranks) <= {flip.rank for flip in flips}


@pytest.mark.long
def test_a_second_accident_of_one_rank_is_none() -> None:
    """A device that errs twice within an hour errs again."""
    flips = [Flip(rank=2), Flip(rank=2, step=2)]
    reports = played(partial(mains.train, micro_batches=3, flips=flips))
    assert {report.ended for report in reports} == {"convicted"}, reports[0].error
    assert [audit.kind for audit in reports[0].audits] == [
        *(Audited.FAILED, Audited.REDONE),
        *(Audited.FAILED, Audited.LYING),
    ]
    assert (reports[0].audits[-1].ranks, reports[0].audits[-1].step) == ((2,), 2)
    # A step that was made again vouches for nothing.
    assert reports[0].audits[-1].clean == 0


@pytest.mark.long
def test_the_stage_is_found_in_which_it_went_wrong() -> None:
    """All that follows is wrong too, on every stage: the first link of the chain that differs tells where it began."""
    flips = [Flip(rank=3, block=3)]
    report = finished(played(partial(mains.train, micro_batches=4, flips=flips), Layout(pp=2, dp=2, zero=2)))
    failed, redone = report.audits
    assert (failed.where, failed.step, failed.ranks) == ("the output of stage 1", 1, (3,))
    assert redone.kind is Audited.REDONE
    assert report.result == quiet(micro_batches=4)


@pytest.mark.long
def test_a_model_that_is_not_deterministic_has_nobody_convicted() -> None:
    """That is said once, and training goes on without audits."""
    reports = played(mains.train_without_bits)
    assert {report.ended for report in reports} == {"done"}, reports[0].error
    assert [audit.kind for audit in reports[0].audits] == [Audited.FAILED, Audited.INCONCLUSIVE]
    assert reports[0].audits[0].ranks == ()


@pytest.mark.long
def test_of_a_stream_the_passes_are_made_again_without_a_hearing() -> None:
    """A stream is read once: what was wrong once is mended all the same, and nobody is named."""
    report = finished(played(partial(mains.train, stream=True, flips=[Flip(rank=1, passes=3)])))
    assert [audit.kind for audit in report.audits] == [Audited.FAILED, Audited.REDONE]
    assert report.audits[0].ranks == ()
    assert report.result == quiet(stream=True)


def test_what_is_not_audited_is_said() -> None:
    """Nobody is to believe that a run is watched which is not."""
    report = finished(played(mains.train_fast, Layout(pp=1, dp=2, zero=2)))
    (off,) = report.audits
    assert off.kind is Audited.OFF
    assert 'reduction="fast"' in off.detail

"""Audits change no bit, and find the rank that computes wrongly before its numbers get into the weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from elastic3d.coverage import AuditCoverage
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


def played(
    main: Callable[[Run], Any], layout: Layout = THREE, audit: float = 1.0, newcomers: tuple[int, ...] = ()
) -> list[Report]:
    return run_world(main, Orders(layout=layout, audit=audit, newcomers=newcomers))


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
        # A copy of the state on each rank: nobody gathers anything from another one.
        (Layout(pp=1, dp=2, zero=3, replicas=2), 1),
        pytest.param(Layout(pp=1, dp=2, zero=1), 2, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_audits_change_no_bit(layout: Layout, leaf: int) -> None:
    """Every step is audited, all ranks agree each time, and the state is that of a run without audits."""
    report = finished(played(partial(mains.train, leaf=leaf), layout))
    assert report.result == quiet(leaf=leaf)
    assert report.audits == []


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("layout", [THREE, Layout(pp=2, dp=2, zero=2), Layout(pp=1, dp=4, zero=1)], ids=str)
def test_five_hundred_audits_name_nobody(layout: Layout) -> None:
    """Each step is audited, on a machine whose processors are right: nothing is said, and no bit differs."""
    reports = run_world(partial(mains.train, steps=500), Orders(layout=layout, audit=1.0), patience=1000)
    report = finished(reports)
    assert report.result == quiet(steps=500)
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
        heard, verdict = report.audits
        assert len(heard.parts) == dp
        assert 0 < min(heard.parts) <= heard.seconds
        assert (verdict.step, verdict.clean) == (1, 0)
        assert verdict.ranks
        assert set(verdict.ranks) <= {flip.rank for flip in flips}


@pytest.mark.parametrize(
    "dies", [pytest.param(1, id="the accused"), pytest.param(2, id="a witness", marks=pytest.mark.long)]
)
def test_a_death_in_a_hearing_is_a_death_and_convicts_nobody(dies: int) -> None:
    """What was not heard to its end is no verdict: the others lose a peer, and make no update of that step."""
    flip = Flip(rank=1, passes=STAYS)
    reports = played(partial(mains.train, micro_batches=3, flips=(flip,), dies=dies), Layout(pp=1, dp=3, zero=2))
    assert reports.pop(dies).ended == "died"
    for report in reports:
        assert report.ended == "peer lost", report.error
        assert [record.step for record in report.records] == [1]
        assert report.audits == []


@pytest.mark.long
def test_of_two_that_differ_who_errs_in_a_known_product_is_convicted() -> None:
    """There is no third node; the known result is the second witness. Where both come to it, nobody is set aside."""
    flips = [Flip(rank=1, passes=STAYS)]
    two = Layout(pp=1, dp=2, zero=2)
    reports = played(partial(mains.train, micro_batches=2, flips=flips, multiplies_wrongly=1), two)
    assert {report.ended for report in reports} == {"convicted"}, reports[0].error
    assert {(report.audits[-1].ranks, report.audits[-1].step) for report in reports} == {((1,), 1)}


PART = Flip(rank=3, what="part", block=1)
"""Rank 3 computes a part of the layers of replica 1, on its node with rank 2, and both get the sum."""


@pytest.mark.long
def test_layers_that_are_cut_are_audited() -> None:
    """All ranks that share a layer's sum are named, on the one node where they are, and no bit changes."""
    report = finished(played(partial(mains.train_cut, flips=[PART]), Layout(pp=1, dp=2, tp=2, zero=3)))
    assert [audit.kind for audit in report.audits] == [Audited.FAILED, Audited.REDONE]
    failed, _ = report.audits
    assert (failed.ranks, failed.nodes, failed.finding) == ((2, 3), ("node1",), "transient")
    assert report.result == finished(played(mains.train_cut, Layout(pp=1, dp=1, tp=2), audit=0.0)).result


@pytest.mark.slow
def test_a_device_that_errs_in_its_part_of_a_layer_is_convicted() -> None:
    """By two other nodes, with the rank that shares its sums."""
    always = replace(PART, passes=STAYS)
    reports = played(partial(mains.train_cut, flips=[always], micro_batches=3), Layout(pp=1, dp=3, tp=2, zero=2))
    assert {report.ended for report in reports} == {"convicted"}, reports[0].error
    assert {(report.audits[-1].ranks, report.audits[-1].nodes) for report in reports} == {((2, 3), ("node1",))}


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


@pytest.mark.parametrize(("age", "ended"), [(600.0, "convicted"), pytest.param(3700.0, "done", marks=pytest.mark.long)])
def test_an_accident_in_a_generation_before_counts_for_an_hour(age: float, ended: str) -> None:
    """Of the same rank's device; that of another rank's is one of its own."""
    orders = Orders(layout=THREE, audit=1.0, accidents={0: 60.0, 2: age})
    reports = run_world(partial(mains.train, micro_batches=3, flips=[Flip(rank=2)]), orders)
    assert {report.ended for report in reports} == {ended}, reports[0].error
    last = Audited.LYING if ended == "convicted" else Audited.REDONE
    for report in reports:
        assert [(audit.kind, audit.ranks) for audit in report.audits] == [(Audited.FAILED, (2,)), (last, (2,))]


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
def test_a_model_that_is_not_deterministic_has_nobody_convicted(tmp_path: Path) -> None:
    """That is said once, and training goes on without audits; so do later generations, and they say why."""
    orders = Orders(layout=THREE, audit=1.0, snapshot_every=1, keep=tmp_path)
    reports = run_world(mains.train_without_bits, orders)
    assert {report.ended for report in reports} == {"done"}, reports[0].error
    assert [audit.kind for audit in reports[0].audits] == [Audited.FAILED, Audited.INCONCLUSIVE]
    assert reports[0].audits[0].ranks == ()
    assert reports[0].coverage == AuditCoverage(every=1, pieces=0.75, nodes=3, sums=0.2)
    for file in tmp_path.glob(f"{mains.STEPS}.*"):
        file.unlink()
    again = run_world(mains.train_without_bits, Orders(layout=Layout(pp=1, dp=2), audit=1.0, take=tmp_path))
    assert {report.ended for report in again} == {"done"}, again[0].error
    (off,) = again[0].audits
    assert (off.kind, len(again[0].records)) == (Audited.OFF, 1)
    assert "equal inputs did not give equal bits in step 0" in off.detail
    assert again[0].coverage == AuditCoverage(off=off.detail)


def test_audits_that_are_dearer_than_planned_come_more_rarely(tmp_path: Path) -> None:
    """All ranks and their loaders change to the same schedule at once, no bit differs, and what follows begins with it.

    A tenth of a step pays for one audit in 3 if a round of four is a quarter of a step, and in 8 if it takes 0.8.
    """
    pair, steps = Layout(pp=1, dp=2), 40
    main = partial(mains.train_dearly, steps=steps)
    report = finished(run_world(main, Orders(layout=pair, audit=0.1, snapshot_every=steps, keep=tmp_path)))
    assert report.result == finished(played(main, Layout(pp=1, dp=1), audit=0.0)).result
    (planned,) = report.audits
    assert planned.kind is Audited.PLANNED
    assert planned.coverage is not None
    assert report.coverage is not None
    assert (planned.coverage.every, report.coverage.every) == (8, 3)
    assert "takes 80% longer than others" in planned.detail
    following = partial(mains.train_dearly, steps=steps + 8)
    again = finished(run_world(following, Orders(layout=pair, audit=0.1, take=tmp_path)))
    assert again.coverage is not None
    assert (again.audits, again.coverage.every) == ([], 8)


@pytest.mark.long
def test_what_a_stream_gave_is_heard_again() -> None:
    """A stream is read once: what may have to be repeated is kept for the step, and the rank is named and convicted."""
    flips = [Flip(rank=1, passes=STAYS)]
    reports = played(partial(mains.train, stream=True, micro_batches=3, flips=flips))
    assert {report.ended for report in reports} == {"convicted"}, reports[0].error
    assert {report.audits[-1].ranks for report in reports} == {(1,)}


@pytest.mark.parametrize(
    "layout",
    [
        Layout(pp=2, dp=2, zero=2, schedule=Schedule.ZERO_BUBBLE, virtual=2),
        pytest.param(THREE, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_a_newcomer_that_computes_rightly_is_let_in_and_no_bit_changes(layout: Layout) -> None:
    """It is examined once, before the first step; the run goes on as without an exam."""
    micro_batches = 3 if layout is THREE else 8
    main = partial(mains.train, micro_batches=micro_batches)
    report = finished(played(main, layout, newcomers=(layout.world - 1,)))
    (examined,) = report.audits
    assert (examined.kind, examined.step, examined.nodes) == (Audited.EXAMINED, 0, (f"node{layout.world - 1}",))
    assert report.result == quiet(micro_batches=micro_batches)


@pytest.mark.parametrize("dp", [2, pytest.param(3, marks=pytest.mark.long)])
def test_a_newcomer_that_computes_wrongly_makes_no_step(dp: int) -> None:
    """With dp 2 the one that was there before knows the answer; nothing that was made before is doubted for it."""
    flips = (Flip(rank=1, step=0, passes=STAYS),)
    reports = played(partial(mains.train, micro_batches=dp, flips=flips), Layout(pp=1, dp=dp), newcomers=(1,))
    assert {report.ended for report in reports} == {"convicted"}, reports[0].error
    for report in reports:
        assert report.records == []
        assert [audit.kind for audit in report.audits] == [Audited.UNFIT, Audited.LYING]
        assert [(audit.ranks, audit.nodes, audit.step) for audit in report.audits] == [((1,), ("node1",), 0)] * 2
        assert report.audits[-1].clean == -1


def test_what_is_not_audited_is_said() -> None:
    """Nobody is to believe that a run is watched which is not."""
    report = finished(played(mains.train_fast, Layout(pp=1, dp=2, zero=2)))
    (off,) = report.audits
    assert off.kind is Audited.OFF
    assert 'reduction="fast"' in off.detail

"""Sums that go from replica to replica: the bits of one rank, fewer bytes between nodes, and all else as it was."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest

from elastic3d.data import Growing
from elastic3d.health.phases import Axis
from elastic3d.planner.passing import LEAST, passed_on
from elastic3d.values import Layout
from tests.parallel import (
    adaptive_mains,
    exchanged_mains,
    mains,
    numeric_mains,
    passed_mains,
    pipeline_mains,
    recorded_mains,
)
from tests.parallel import unsound_mains as unsound
from tests.parallel.worlds import Orders, Report, run_world

GROWN = Growing((0, 12), (2, 8))
"""6 and then 4 micro-batches."""


def test_sums_are_passed_on_where_that_sends_less() -> None:
    """In replicas of some ranks, which all have a piece in each turn."""
    assert passed_on(Layout(pp=1, dp=2 * LEAST, replicas=2))
    assert not passed_on(Layout(pp=1, dp=2 * LEAST))
    assert not passed_on(Layout(pp=1, dp=2 * LEAST, replicas=4))
    assert not passed_on(Layout(pp=1, dp=2 * LEAST, zero=2, replicas=2, shares=(1,) * (2 * LEAST - 1) + (2,)))


def finished(reports: list[Report]) -> list[Report]:
    for report in reports:
        assert report.ended == "done", report.error
    return reports


def played(main: Callable[..., Any], layout: str, **orders: Any) -> list[Report]:
    """Return what a world says in which sums are passed on, and have been."""
    reports = run_world(partial(passed_mains.passed_on, main), Orders(layout=Layout.parse(layout), **orders))
    assert all(report.result.spread for report in finished(reports))
    return reports


@cache
def alone(main: Callable[..., Any], **orders: Any) -> Report:
    """Return what one rank says, which every layout must equal."""
    return finished(run_world(main, Orders(layout=Layout(pp=1, dp=1), **orders)))[0]


@pytest.mark.gloo
@pytest.mark.parametrize(
    "layout",
    [
        "pp=1,dp=4,zero=3,replicas=2",
        pytest.param("pp=1,dp=6,zero=1,replicas=3", marks=pytest.mark.long),
        pytest.param("pp=1,dp=6,zero=2,replicas=2", marks=pytest.mark.slow),
        pytest.param("pp=1,dp=8,zero=2,replicas=4", marks=pytest.mark.slow),
        pytest.param("pp=1,dp=8,zero=3,replicas=2", marks=pytest.mark.slow),
    ],
)
def test_sums_that_are_passed_on_change_no_bit(layout: str) -> None:
    """With uneven shards, unused parameters, clipping, and replicas that have no piece in a step's last turn."""
    reference, reports = alone(mains.train), played(mains.train, layout)
    assert {report.result.trained for report in reports} == {reference.result}
    for report in reports:
        mine = [(r.step, r.loss, r.gradient_norm) for r in report.records]
        assert mine == [(r.step, r.loss, r.gradient_norm) for r in reference.records]


BF16 = partial(numeric_mains.train_sent, precision="bf16", bound=700)
LEAVES = partial(numeric_mains.train_sent, precision="bf16", leaf=2, size=GROWN, steps=4)


@pytest.mark.gloo
@pytest.mark.long
@pytest.mark.parametrize(
    ("main", "layout"),
    [
        (BF16, "pp=1,dp=4,zero=2,replicas=2"),
        (LEAVES, "pp=1,dp=4,zero=1,replicas=2"),
        pytest.param(BF16, "pp=2,dp=4,zero=2,replicas=2,schedule=zbv,virtual=2", marks=pytest.mark.slow),
        pytest.param(LEAVES, "pp=2,dp=4,zero=3,replicas=2,schedule=1f1b", marks=pytest.mark.slow),
    ],
    ids=["parts", "leaves", "split", "stages"],
)
def test_whatever_is_sent_has_the_bits_of_one_rank(main: Callable[..., Any], layout: str) -> None:
    """Units in parts, pieces in 16 bits, sums of leaves, and stages of one rank that share its group."""
    trained = alone(main).result.trained
    for report in played(main, layout):
        mine = report.result.trained.trained
        assert (mine.digest, mine.losses) == (trained.digest, trained.losses)


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", ["pp=2,dp=4,zero=3,replicas=2,schedule=interleaved,virtual=2", "pp=2,dp=4,replicas=2,schedule=gpipe"]
)
def test_stages_pass_their_sums_on_in_one_order(layout: str) -> None:
    """Several stages of a rank do so in one group."""
    digest = alone(pipeline_mains.train).result
    assert {report.result.trained for report in played(pipeline_mains.train, layout)} == {digest}


MEASURED = adaptive_mains.train_squared
TWO = partial(MEASURED, leaf=2)
POISONED = partial(
    MEASURED,
    dataset=unsound.Poisoned({5: unsound.LOSS, 20: unsound.GRADIENT, 30: unsound.LOSS}),
    loss=unsound.poisoned_loss,
)


@pytest.mark.gloo
def test_leaves_are_measured_alike_where_sums_are_passed_on() -> None:
    """To the last bit of each square: those of one rank, in steps of which a replica has no leaf of the last turn."""
    wanted = alone(MEASURED).result
    assert len(set(wanted.trained.sizes)) == 3
    assert any(len(squares) % 4 in (1, 2) for squares in wanted.squares)
    for report in played(MEASURED, "pp=1,dp=4,zero=2,replicas=2"):
        assert report.result.trained == wanted


@pytest.mark.gloo
@pytest.mark.long
@pytest.mark.parametrize(
    ("main", "layout", "orders"),
    [
        (TWO, "pp=1,dp=4,zero=3,replicas=2", {}),
        (MEASURED, "pp=1,dp=4,zero=1,replicas=2", {"audit": 0.3}),
        (POISONED, "pp=1,dp=4,zero=2,replicas=2", {"numerics": "skip"}),
        pytest.param(MEASURED, "pp=1,dp=6,zero=2,replicas=3", {}, marks=pytest.mark.slow),
        pytest.param(MEASURED, "pp=1,dp=8,zero=2,replicas=2", {}, marks=pytest.mark.slow),
        pytest.param(TWO, "pp=2,dp=4,zero=2,replicas=2,schedule=1f1b", {}, marks=pytest.mark.slow),
    ],
    ids=["leaves", "audited", "left out", "three", "four ranks", "stages"],
)
def test_leaves_are_measured_alike_however_they_are_passed_on(
    main: Callable[..., Any], layout: str, orders: dict[str, Any]
) -> None:
    """Of several micro-batches, in audited steps between others, without what is not finite, and in stages."""
    wanted = alone(main, **orders).result
    assert len(set(wanted.trained.sizes)) > 1
    for report in played(main, layout, **orders):
        assert report.result.trained == wanted


@pytest.mark.gloo
def test_a_replica_sends_the_sum_once_a_turn() -> None:
    """Six pieces of a step are two turns of two replicas: the last one sends to all in the second, the first never."""
    main = partial(numeric_mains.train_sent, size=12, steps=1)
    reports = played(main, "pp=1,dp=4,zero=2,replicas=2")
    units = len(reports[0].result.spread)
    for report in reports:
        first = report.rank < 2
        assert len(report.result.sent) == (2 if first else 1) * units
        assert sum(report.result.sent) == (2 if first else 1) * sum(report.result.spread)


@pytest.mark.gloo
@pytest.mark.long
def test_audited_steps_pass_nothing_on() -> None:
    """One step in three is audited, in which pieces go to their owner: the bits are the same, and nobody is named."""
    main = partial(exchanged_mains.train, steps=7)
    layout = "pp=1,dp=4,zero=3,replicas=2"
    always = run_world(partial(passed_mains.passed_on, main), Orders(layout=Layout.parse(layout), audit=1.0))
    some = played(main, layout, audit=0.3)
    assert {report.result.trained for report in (*finished(always), *some)} == {alone(main).result}
    assert not any(report.result.spread for report in always)
    whole = played(partial(exchanged_mains.train, steps=7), layout)
    assert 0 < len(some[0].result.spread) < len(whole[0].result.spread)
    assert all(report.audits == [] for report in some)
    assert {report.result.idle for report in some} == {0}, "a step has the memory of its own kind of sums alone"


@pytest.mark.gloo
@pytest.mark.long
def test_what_is_left_out_is_passed_over() -> None:
    """The passes are made again without what is not finite, with the bits of a run that knows it beforehand."""
    marks = ((3, unsound.LOSS), (7, unsound.GRADIENT), (11, unsound.LOSS))
    layout = "pp=1,dp=4,zero=3,replicas=2"
    made = [report.result.trained for report in played(partial(unsound.train, marks=marks), layout, numerics="skip")]
    assert made[0].holes
    known = partial(unsound.train, marks=marks, exclude=made[0].holes)
    assert {one.digest for one in made} == {alone(known).result.digest}


@pytest.mark.gloo
@pytest.mark.long
def test_replicas_record_what_they_wait_for_alike() -> None:
    """Every rank of a place counts the same operations, so that who is behind is who has posted fewer."""
    reports = played(recorded_mains.ordered, "pp=1,dp=4,replicas=2")
    programs = [[program for _, program in report.result.trained] for report in reports]
    for step in range(recorded_mains.STEPS):
        for shard in (0, 1):
            one, other = (
                [mark for axis, mark in programs[rank][step] if axis == Axis.REPLICA] for rank in (shard, shard + 2)
            )
            assert one == other != []
    for report in reports:
        for record, _ in report.result.trained:
            assert all(count.posted == count.done for count in record.axes), record.axes


@pytest.mark.gloo
def test_a_rank_that_dies_leaves_nobody_waiting() -> None:
    """Whoever waits for its sum hears of it."""
    reports = run_world(
        partial(passed_mains.passed_on, mains.dies), Orders(layout=Layout(pp=1, dp=4, zero=2, replicas=2))
    )
    assert [report.ended for report in reports].count("died") == 1
    assert {report.ended for report in reports} == {"died", "peer lost"}

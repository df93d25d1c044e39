"""Unequal shares of a step's micro-batches: the same bits as equal ones, and the fast are a round ahead of the slow."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic3d.port import Audited
from elastic3d.training import Run
from elastic3d.values import Layout
from tests.parallel import audited_mains, mains, numeric_mains, paced_mains, unsound_mains
from tests.parallel.audited_mains import Flip
from tests.parallel.models import Model, Sentences, loss_fn
from tests.parallel.unsound_mains import GRADIENT, LOSS
from tests.parallel.worlds import Orders, Report, run_world

pytestmark = pytest.mark.gloo

ALONE = Layout(pp=1, dp=1)


def shared(*shares: int, zero: int = 2, replicas: int = 1) -> Layout:
    return Layout(pp=1, dp=len(shares), zero=zero, replicas=replicas, shares=shares)


def finished(reports: list[Report]) -> Any:
    for report in reports:
        assert report.ended == "done", report.error
        assert report.result == reports[0].result
    return reports[0].result


def played(main: Callable[[Run], Any], layout: Layout = ALONE, **orders: Any) -> Any:
    return finished(run_world(main, Orders(layout=layout, **orders)))


@pytest.fixture(scope="module")
def alone() -> Any:
    """What the run of one rank comes to, which every layout must equal."""
    return played(mains.train)


def test_shares_change_no_bit_of_a_step(alone: Any) -> None:
    """With dropout, clipping, unused parameters, and 7 micro-batches a step, so that its last turn is cut."""
    assert played(mains.train, shared(1, 3, 2)) == alone


@pytest.mark.long
@pytest.mark.parametrize("layout", [shared(1, 2, zero=1), shared(2, 1, 3, 3, replicas=2)], ids=str)
def test_further_shares_change_no_bit_either(layout: Layout, alone: Any) -> None:
    """With ZeRO-1, and with replicas, which meet at the step's end."""
    assert played(mains.train, layout) == alone


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_shares_drawn_at_random_change_no_bit(seed: int, alone: Any) -> None:
    draw = random.Random(seed)
    dp = draw.choice([2, 3, 4])
    layout = shared(*(draw.randint(1, 5) for _ in range(dp)), zero=draw.choice([1, 2]))
    assert played(mains.train, layout) == alone


@pytest.mark.long
def test_leaves_are_shared_as_wholes() -> None:
    """In bf16, with leaves of 2 micro-batches, in steps of 3 and then of 4 leaves."""
    main = partial(numeric_mains.train, precision="bf16", leaf=2, size=numeric_mains.Growing((0, 12), (2, 16)), steps=4)
    assert played(main, shared(2, 1)) == played(main)


@pytest.mark.long
def test_tokens_have_equal_weights_whoever_computes_them() -> None:
    assert played(numeric_mains.train_tokens, shared(1, 3)) == played(numeric_mains.train_tokens)


@pytest.mark.long
def test_audits_change_no_bit_and_find_a_liar_by_what_it_ran() -> None:
    """Each column repeats another one's micro-batches after the step's own turns, in which all take part again."""
    layout, main = shared(1, 3, 2), partial(audited_mains.train, micro_batches=9)
    quiet = played(main)
    assert played(main, layout, audit=1.0) == quiet
    liar = partial(main, flips=[Flip(rank=1, block=2, passes=99)])
    reports = run_world(liar, Orders(layout=layout, audit=1.0))
    assert {(report.ended, report.error) for report in reports} == {("convicted", "(1,)")}
    assert [said.kind for said in reports[0].audits] == [Audited.FAILED, Audited.LYING]


@pytest.mark.long
def test_what_is_not_finite_is_left_out_of_unequal_shares() -> None:
    """The micro-batch is found by the turn in which its owner ran it, and heard over by all ranks."""
    marks = ((5, LOSS), (20, GRADIENT), (30, LOSS))
    main = partial(unsound_mains.train, marks=marks)
    made = played(main, shared(1, 3, 2), numerics="skip")
    assert len(made.holes) >= 2
    assert made.digest == played(partial(main, exclude=made.holes)).digest


@pytest.mark.long
def test_nobody_gathers_parameters_while_others_go_on() -> None:
    """Not even in a model whose root has no parameters of its own, with ranks that have several micro-batches."""
    main = partial(paced_mains.train, seconds=0.0, slow={}, micro_batches=10, steps=3)
    for report in run_world(main, Orders(layout=shared(2, 5, 3))):
        assert report.ended == "done", report.error


def ahead(run: Run, *, folder: Path, waits: float) -> int:
    """Train; have rank 0 send the gradients of a micro-batch only when rank 1 is at the one of the turn after it.

    Return how often it waited in vain. Not in the first step, in which nobody knows yet how many exchanges a turn has.
    """
    model = run.shard(lambda: Model(dropout=0.0), blocks="blocks", seed=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    batches = run.batches(Sentences(), global_batch=12, micro_batch=2, seed=11)
    run.restore(model=model, optimizer=optimizer, batches=batches)
    begun, vain = 0, 0

    def begin(*given: Any) -> None:
        nonlocal begun
        begun += 1
        if run.rank == 1:
            (folder / f"{run.steps}.{begun}").touch()

    def awaiting(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        nonlocal vain
        if run.rank == 0 and run.steps:
            # Turns (0, 1), (1), (0, 1), (1): its first is of turn 0, its second of turn 2.
            awaited, until = folder / f"{run.steps}.{2 * begun}", time.monotonic() + waits
            while not awaited.exists() and time.monotonic() < until:
                time.sleep(0.01)
            vain += not awaited.exists()
        return loss_fn(output, target)

    model.register_forward_pre_hook(begin)
    for batch in batches.until(step=3):
        begun = 0
        run.step(optimizer, loss=run.backward(model, batch, awaiting))
    return vain


def test_who_is_fast_goes_on_while_the_slow_one_computes(tmp_path: Path) -> None:
    """One round ahead, also over a turn that the slow one sits out: it takes part in that before its next pass."""
    assert played(partial(ahead, folder=tmp_path, waits=30.0), shared(1, 2)) == 0

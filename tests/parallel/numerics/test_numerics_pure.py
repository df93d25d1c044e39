from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from elastic3d.errors import UsageError
from elastic3d.parallel.numerics.objective import objective, weighed
from elastic3d.parallel.numerics.precision import Precision
from elastic3d.parallel.numerics.scale import INTERVAL, LEAST, LossScale
from elastic3d.parallel.numerics.update import update
from elastic3d.parallel.vote import Ballot, Outcome, Paper
from elastic3d.training import Run, run_alone
from tests.parallel.models import Model, Sentences, loss_fn


def test_the_loss_scale_halves_on_overflow_and_doubles_after_good_steps() -> None:
    """Only steps in a row count; the scale has a minimum; without fp16 it never moves."""
    scale = LossScale.of(Precision.FP16)
    for _ in range(INTERVAL - 1):
        scale = scale.after(finite=True)
    assert scale == LossScale(scale=2.0**16, good=INTERVAL - 1)
    assert scale.after(finite=True) == LossScale(scale=2.0**17)
    assert scale.after(finite=False) == LossScale(scale=2.0**15)
    assert LossScale(scale=LEAST).after(finite=False) == LossScale(scale=LEAST)
    for other in (Precision.FP32, Precision.BF16):
        assert LossScale.of(other).after(finite=False).scale == 1.0


def test_the_loss_scale_is_part_of_the_state() -> None:
    """It is restored from facts; where the saved run had none, or this one needs none, this run keeps its own."""
    held = LossScale(scale=2.0**9, good=7)
    fresh, none = LossScale.of(Precision.FP16), LossScale.of(Precision.BF16)
    assert fresh.restored(held) == held
    assert fresh.restored(None) == fresh
    assert none.restored(held) == none


def outcome(*ballots: Ballot, micro_batches: int = 2) -> Outcome:
    paper = Paper(world=len(ballots), micro_batches=micro_batches, parameters=[])
    votes = torch.stack([paper.fill(rank, ballot, norm=False) for rank, ballot in enumerate(ballots)]).sum(0)
    return paper.read(votes, norm=False)


def test_tokens_are_counted_over_all_ranks() -> None:
    """The loss is the mean over tokens; a micro-batch may have none of them."""
    totals = outcome(Ballot(losses={0: 6.0}, tokens={0: 3.0}), Ballot(losses={1: 0.0}, tokens={1: 0.0}))
    assert (totals.loss, totals.tokens) == (2.0, 3.0)
    assert outcome(Ballot(losses={0: 6.0, 1: 2.0})).loss == 4.0


def test_a_step_without_tokens_is_skipped() -> None:
    """There is no mean to follow, and the scale is not the cause."""
    totals = outcome(Ballot(losses={0: 0.0, 1: 0.0}, tokens={0: 0.0, 1: 0.0}))
    made = update(totals, clip=1.0, scale=4.0, skip=False)
    assert (made.skipped, made.finite) == (True, True)


def test_pairs_and_means_do_not_mix() -> None:
    """All micro-batches of a step have the same kind of loss."""
    with pytest.raises(UsageError, match="for some micro-batches and a mean for others"):
        outcome(Ballot(losses={0: 1.0, 1: 1.0}, tokens={0: 2.0}))


def test_an_overflow_on_one_rank_counts_on_all() -> None:
    """A gradient that is not finite on one rank makes the step so on all."""
    assert outcome(Ballot()).finite
    assert not outcome(Ballot(), Ballot(finite=False)).finite


def test_scale_tokens_and_clipping_make_one_factor() -> None:
    """The reported norm is that of the true gradient."""
    totals = replace(outcome(Ballot(losses={0: 6.0, 1: 0.0}, tokens={0: 3.0, 1: 1.0})), norm=64.0)
    made = update(totals, clip=1.0, scale=8.0, skip=True)
    assert made.norm == 2.0
    assert made.factor == pytest.approx(0.5 / 32.0, rel=1e-5)
    assert update(replace(totals, norm=math.inf), clip=1.0, scale=8.0, skip=True).skipped
    assert not update(replace(totals, norm=math.inf), clip=1.0, scale=8.0, skip=False).skipped


def test_a_scaled_loss_keeps_its_value() -> None:
    """Only its gradient is scaled, also where the loss is fp16, whose range the scale exceeds."""
    value = torch.tensor(2.0, dtype=torch.float16, requires_grad=True)
    loss = objective(lambda output, target: output * 1.0, 2.0**16)(value, None)
    weighed(loss, 4).backward()  # type: ignore[no-untyped-call]
    assert float(loss) == 2.0
    assert value.grad is not None
    assert float(value.grad) == 2.0**14


@pytest.mark.parametrize(
    ("value", "words"),
    [(torch.zeros(3), r"tensor of shape \(3,\)"), (None, "returned NoneType"), ((1, 2, 3), "returned tuple")],
)
def test_an_invalid_loss_is_refused(value: object, words: str) -> None:
    """A loss is one number, or a sum and a count."""
    with pytest.raises(UsageError, match=words):
        objective(lambda output, target: value, 1.0)(None, None)  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize(
    ("second", "words"),
    [
        (torch.tensor(0.5), "torch.float32"),
        (torch.tensor(True), "torch.bool"),
        (torch.tensor([3]), r"shape \(1,\)"),
        (0.5, "and float"),
        (True, "and bool"),
        ("0.5", "and str"),
    ],
    ids=str,
)
def test_a_metric_beside_the_loss_is_no_count(second: object, words: str) -> None:
    """A loss with an accuracy is refused: divided by it, the gradient would be another one, and nobody would know."""
    with pytest.raises(UsageError, match=rf"{words}.*return the mean loss alone, and give the metric to run\.log"):
        objective(lambda output, target: (torch.tensor(2.0), second), 1.0)(None, None)  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize("second", [3, np.int64(3), torch.tensor(3), torch.tensor(3, dtype=torch.int32)], ids=repr)
def test_a_count_is_of_any_integer_type(second: Any) -> None:
    """Of Python, numpy and torch."""
    assert objective(lambda output, target: (torch.tensor(2.0), second), 1.0)(None, None).tolist() == [2.0, 3.0]


@pytest.mark.parametrize("clip", [None, 1.0])
def test_a_step_that_is_not_finite_is_skipped_on_request(clip: float | None) -> None:
    """Parameters, optimizer and schedule stay; the step is counted. By default it trains on, as torch does."""

    def main(run: Run) -> None:
        model = run.shard(lambda: Model(dropout=0.0), blocks="blocks")
        optimizer = torch.optim.AdamW(model.parameters())
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)
        batches = run.batches(Sentences(), global_batch=4, micro_batch=2)
        run.restore(model=model, optimizer=optimizer, schedule=schedule, batches=batches)
        digests, skipped = [run.digest()], []
        for batch in batches.until(step=3):
            bad = run.steps > 0
            loss = run.backward(model, batch, lambda o, t: loss_fn(o, t) * (math.inf if bad else 1.0))  # noqa: B023
            run.step(optimizer, schedule, loss=loss, clip=clip, skip_nonfinite=run.steps < 2)
            digests.append(run.digest())
            skipped.append(loss.skipped)
        assert skipped == [False, True, False]
        assert digests[0] != digests[1] == digests[2] != digests[3]
        assert schedule.last_epoch == 2
        assert run.steps == 3
        assert run.ledger[-1].samples == 12

    run_alone(main, threads=1)

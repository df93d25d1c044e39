"""What a training loop may not do is refused when it does it, in words, and trains nothing wrongly before."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic3d.data import Batches
from elastic3d.errors import UsageError
from elastic3d.training import Run, run_alone
from tests.parallel.models import Model, Sentences, loss_fn
from tests.training.lives import live


def begun(run: Run, *, restore: bool = True) -> tuple[torch.nn.Module, Any, Batches]:
    """Return a model, its optimizer and its batches."""
    model = run.shard(Model)
    optimizer = torch.optim.AdamW(model.parameters())
    batches = run.batches(Sentences(), global_batch=4, micro_batch=2)
    if restore:
        run.restore(model=model, optimizer=optimizer, batches=batches)
    return model, optimizer, batches


@pytest.mark.parametrize("clip", [0, 0.0, -1.0, math.nan])
def test_a_norm_to_clip_by_is_above_zero(clip: float) -> None:
    """Many scripts mean "no clipping" by 0 or -1, by which gradients would vanish, or turn around."""

    def main(run: Run) -> None:
        model, optimizer, batches = begun(run)
        for batch in batches.until(step=1):
            run.step(optimizer, loss=run.backward(model, batch, loss_fn), clip=clip)

    with pytest.raises(UsageError, match=rf"above 0; it is {clip!r}, .* leave it out, or give None"):
        run_alone(main)


def test_a_step_takes_the_loss_of_its_own_batch() -> None:
    """Its samples are what the ledger has of the step: those of another batch would be counted twice."""

    def main(run: Run, number: bool) -> None:
        model, optimizer, batches = begun(run)
        kept: Any = None
        for batch in batches.until(step=2):
            loss = run.backward(model, batch, loss_fn)
            kept = kept or loss
            run.step(optimizer, loss=kept)
            kept = loss.item() if number else kept

    for number in (False, True):
        with pytest.raises(UsageError, match=r"the loss that run.backward returned for the batch of this step"):
            run_alone(lambda run: main(run, number))  # noqa: B023


@pytest.mark.parametrize(
    ("of", "call", "options", "why"),
    [
        ("optimizer", "step", {}, r"AdamW.step\(\) was called between run.backward and run.step.* Leave it out"),
        ("optimizer", "zero_grad", {}, r"AdamW.zero_grad\(\) was called between run.backward and run.step"),
        ("model", "zero_grad", {}, r"the gradients that run.backward left were zeroed.* Leave out"),
        ("model", "zero_grad", {"set_to_none": False}, r"the gradients that run.backward left were zeroed"),
    ],
    ids=str,
)
def test_what_a_plain_loop_does_with_its_gradient_is_left_to_run_step(
    of: str, call: str, options: dict[str, Any], why: str
) -> None:
    """Left in the loop, the one would make a second update, not clipped, and the other none at all."""

    def main(run: Run, early: bool) -> None:
        model, optimizer, batches = begun(run)
        owner = optimizer if of == "optimizer" else model
        for batch in batches.until(step=2):
            if early:
                getattr(owner, call)(**options)
            loss = run.backward(model, batch, loss_fn)
            if not early:
                getattr(owner, call)(**options)
            run.step(optimizer, loss=loss, clip=1.0)
            assert not optimizer._optimizer_step_pre_hooks
            assert "zero_grad" not in vars(optimizer)

    with pytest.raises(UsageError, match=why):
        run_alone(lambda run: main(run, early=False))
    run_alone(lambda run: main(run, early=True))  # where there is no gradient it does nothing


@pytest.mark.parametrize("seed", [1.0, None, "17", True])
def test_the_seed_of_a_model_is_a_whole_number(seed: Any) -> None:
    """All that is drawn is keyed by it."""

    def main(run: Run) -> None:
        run.shard(Model, seed=seed)

    with pytest.raises(UsageError, match=rf"run.shard: seed={seed!r} is no whole number"):
        run_alone(main)


def test_a_run_has_one_data_set_to_train_on() -> None:
    """A second one, for validation, would take the place of the first; the message says where it goes."""

    def main(run: Run) -> None:
        begun(run, restore=False)
        run.batches(Sentences(), global_batch=4, micro_batch=2)

    with pytest.raises(UsageError, match=r"run.batches was called twice.* to validate on to run.evaluate"):
        run_alone(main)


def test_a_loop_begins_after_restore() -> None:
    """The first call of the loop says what was left out."""

    def main(run: Run) -> None:
        model, _, batches = begun(run, restore=False)
        run.backward(model, next(iter(batches.until(step=1))), loss_fn)

    with pytest.raises(UsageError, match=r"call run.restore before run.backward"):
        run_alone(main)


def test_a_schedule_that_is_stepped_with_a_number_is_kept_by_the_script(tmp_path: Path) -> None:
    """As schedule= it is refused before the first step, and as a part of extra= it goes on where it was."""

    def main(run: Run, given: str, end: int) -> list[float]:
        model = run.shard(Model)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1)
        batches = run.batches(Sentences(), global_batch=4, micro_batch=2)
        kept: dict[str, Any] = {"schedule": schedule} if given == "schedule" else {"extra": {"schedule": schedule}}
        run.restore(model=model, optimizer=optimizer, batches=batches, **kept)
        rates = []
        for batch in batches.until(step=end):
            run.step(optimizer, loss=run.backward(model, batch, loss_fn))
            schedule.step(2.0)
            rates.append(optimizer.param_groups[0]["lr"])
        return rates

    with pytest.raises(UsageError, match=r"that of ReduceLROnPlateau takes more .*'metrics'.* extra="):
        live(lambda run: main(run, "schedule", 1))
    whole = live(lambda run: main(run, "extra", 6))
    assert len(set(whole)) == 3
    live(lambda run: main(run, "extra", 6), keep=tmp_path, leave_at=3)
    assert live(lambda run: main(run, "extra", 6), take=tmp_path) == whole[3:]

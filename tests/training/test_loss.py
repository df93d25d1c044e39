"""The loss of a step, as loops read it: before `run.step` and after it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic3d.data import Batch
from elastic3d.errors import StateUnfit, UsageError
from elastic3d.training import Run, state_facts
from elastic3d.training.loss import EarlyLoss, Loss
from elastic3d.values import Layout
from tests.parallel import outside_mains
from tests.parallel.models import Model, Sentences, loss_fn
from tests.parallel.worlds import Orders, run_world
from tests.training.lives import live


def batch(step: int = 4) -> Batch:
    return Batch(step=step, count=1, micro_batches=(), samples=0, sample_sum=0)


def train(run: Run) -> list[tuple[float, float]]:
    """Return the loss of each step as it is read before `run.step`, and after it."""
    model = run.shard(Model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batches = run.batches(Sentences(), global_batch=4, micro_batch=2)
    run.restore(model=model, optimizer=optimizer, batches=batches)
    read = []
    for batch in batches.until(step=4):
        loss = run.backward(model, batch, loss_fn)
        with pytest.warns(EarlyLoss, match=f"the loss of step {batch.step} was read before run.step"):
            early = loss.item()
        run.step(optimizer, loss=loss)
        read.append((early, loss.item()))
    return read


def test_a_loss_read_too_early_is_that_of_the_step_before() -> None:
    """NaN in the first step of a run; and it is said, so that no curve is off by one unnoticed."""
    read: Any = live(train)
    early, late = zip(*read, strict=True)
    assert math.isnan(early[0])
    assert early[1:] == late[:-1]
    assert len(set(late)) == len(late)


def test_what_an_early_loss_is_does_not_depend_on_restarts(tmp_path: Path) -> None:
    """The loss of the step before is part of the state: a generation that begins reads what its predecessor would."""
    read: Any = live(train)
    assert live(train, keep=tmp_path, leave_at=2) is None
    again: Any = live(train, take=tmp_path)
    assert again == read[2:]


def test_a_loss_is_used_as_a_number_and_as_a_tensor_of_one() -> None:
    """Before the step with what is known, and a warning; `value` alone is never that of another step."""
    loss = Loss({0: torch.tensor(0.5)}, batch(), before=1.5)
    assert str(loss) == f"{loss}" == "Loss(known after run.step; 1.5 in the step before)"
    assert str(Loss({}, batch())) == "Loss(known after run.step)"
    with pytest.raises(UsageError, match=r"known after run.step"):
        _ = loss.value
    with pytest.warns(EarlyLoss, match=r"the loss of the step before; read it after run.step"):
        assert (float(loss), loss.detach().cpu().item(), f"{loss:.2f}") == (1.5, 1.5, "1.50")
    with pytest.warns(EarlyLoss, match="NaN, since no step was made before"):
        assert math.isnan(Loss({}, batch(0)))
    loss.settle(0.25, skipped=False)
    assert (float(loss), loss.item(), f"{loss:.2f}", str(loss)) == (0.25, 0.25, "0.25", "0.25")
    with pytest.raises(UsageError, match=r"leave loss.backward\(\) out"):
        loss.backward()


def test_states_of_older_versions_have_no_loss_and_wrong_ones_are_refused() -> None:
    """Whatever is no number in hexadecimal is named as unreadable, like the other facts."""
    plain: dict[str, Any] = {
        "step": 2,
        "order": {"length": 9, "global_batch": 2, "micro_batch": 1, "seed": 0},
        "ledger": [],
        "optimizer_groups": [],
        "schedule": None,
    }
    assert math.isnan(state_facts.parse(plain, 2).last_loss)
    assert state_facts.parse({**plain, "loss": (0.1).hex()}, 2).last_loss == 0.1
    for wrong in ("much", "0x1p99999", 3):
        with pytest.raises(StateUnfit, match="step 2 says beside its tensors cannot be read"):
            state_facts.parse({**plain, "loss": wrong}, 2)


@pytest.mark.gloo
@pytest.mark.parametrize("layout", [Layout(pp=2, dp=1), Layout(pp=1, dp=2)], ids=str)
def test_every_rank_reads_the_same_early_loss(layout: Layout) -> None:
    """Also a stage that computes no loss; read on one rank alone, nobody waits."""
    reports = run_world(outside_mains.read_early, Orders(layout=layout))
    assert [report.error for report in reports] == ["", ""]
    assert reports[0].result == reports[1].result
    early, late = zip(*reports[0].result, strict=True)
    assert early == (None, *late[:-1])

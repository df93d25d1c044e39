"""Mistakes that would train nothing, or not what is meant, are refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

from checkpointing.format.tiles import Box, TensorSpec
from checkpointing.reading.sources import Offered
from elastic3d.data import Batches, TokenBudget
from elastic3d.errors import StateUnfit, UsageError
from elastic3d.training import Run, identity, loading, restoring, run_alone
from elastic3d.training.restoring import Decision
from elastic3d.training.state_facts import AskedState
from elastic3d.values import from_json, to_json


def test_an_optimizer_of_another_model_is_refused() -> None:
    """Its steps would change a model that nobody runs."""

    def main(run: Run) -> None:
        model = run.shard(lambda: nn.Linear(2, 2))
        other = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
        batches = run.batches([(torch.ones(2), torch.ones(2))] * 4, global_batch=2, micro_batch=1)
        run.restore(model=model, optimizer=other, batches=batches)

    with pytest.raises(UsageError, match="2 of the 2 parameters of this SGD are not those of the model"):
        run_alone(main)


def specs(depth: int, width: int = 4) -> list[TensorSpec]:
    return [TensorSpec(key=f"model/blocks.{i}.weight", dtype="float32", shape=(width, width)) for i in range(depth)]


def decided(saved: list[TensorSpec]) -> Decision:
    saved = [*saved, TensorSpec(key="optimizer/blocks.0.weight/step", dtype="float32", shape=())]
    offers = [
        Offered(
            spec=spec,
            box=Box(start=(0,) * len(spec.shape), stop=spec.shape),
            digest="",
            source=restoring.STORE,
            where=[],
        )
        for spec in saved
    ]
    return Decision(source=restoring.STORE, step=7, offers=tuple(offers))


def test_the_state_of_another_model_is_refused() -> None:
    """Deeper, shallower or wider: the error names the differences, and says that trying again does not help."""
    loading.check_model(decided(specs(3)), specs(3))
    with pytest.raises(StateUnfit, match=r"the state lacks model/blocks.3.weight; |the state lacks .* and 2 more"):
        loading.check_model(decided(specs(3)), specs(8))
    with pytest.raises(StateUnfit, match=r"step 7 .* the model lacks model/blocks.2.weight\. Trying again"):
        loading.check_model(decided(specs(3)), specs(2))
    with pytest.raises(StateUnfit, match=r"blocks.0.weight \(float32\[4, 4\], now float32\[5, 5\]\)"):
        loading.check_model(decided(specs(1)), specs(1, width=5))
    assert StateUnfit.final


def asked(
    lr: float = 0.1,
    *,
    optimizer: type[Any] = torch.optim.SGD,
    steps: int = 9,
    micro_batch: int = 2,
    leaf: int = 1,
    tokens: int = 0,
) -> Any:
    made = optimizer(nn.Linear(2, 2).parameters(), lr=lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(made, T_max=steps)
    size: int | TokenBudget = TokenBudget(tokens, lengths=[2] * 9) if tokens else micro_batch
    order = Batches([(0, 0)] * 9, global_batch=8, micro_batch=size, seed=0).order
    plain = json.dumps(to_json(identity.asked(made, schedule, order, leaf)))
    return from_json(AskedState, json.loads(plain))


def test_a_changed_script_resumes_where_possible() -> None:
    """The saved state goes on where it fits; another class of optimizer cannot take it."""
    assert identity.changes(asked(), asked()) == []
    said = identity.changes(asked(), asked(lr=0.01))
    assert (
        "lr of parameter group 0 is 0.01 in the script and was 0.1 when the run began: the saved one counts" in said[0]
    )
    assert any("T_max of the schedule is 20" in text for text in identity.changes(asked(), asked(steps=20)))
    assert "micro_batch was 2 and is 4" in identity.changes(asked(), asked(micro_batch=4))[0]
    assert identity.changes(asked(tokens=8), asked(tokens=8)) == []
    said = identity.changes(asked(), asked(tokens=8))
    assert "micro_batch was 2 and is TokenBudget(8, lengths" in said[0]
    with pytest.raises(StateUnfit, match=r"SGD as its optimizer, and this script has .*AdamW"):
        identity.changes(asked(), asked(optimizer=torch.optim.AdamW))


def test_leaves_stay_the_same_for_the_whole_run() -> None:
    """Other leaves would be another order of sums; states of versions without leaves were trained with 1."""
    identity.check_sums(asked(leaf=4), asked(leaf=4))
    identity.check_sums(None, asked())
    plain = to_json(asked())
    del plain["leaf"]
    identity.check_sums(from_json(AskedState, plain), asked())
    with pytest.raises(StateUnfit, match=r"trained with leaf=4, and this script has leaf=2: .* go back to .*leaf=4\)"):
        identity.check_sums(asked(leaf=4), asked(leaf=2))
    for saved in (None, asked()):
        with pytest.raises(StateUnfit, match=r"trained with leaf=1, and this script has leaf=2: "):
            identity.check_sums(saved, asked(leaf=2))

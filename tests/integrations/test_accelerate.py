"""AcceleratorCheckpoints of what an Accelerator has prepared; by torchrun with a kill in test_restart."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from torch.distributed.checkpoint.api import CheckpointException

from checkpointing import open_store
from checkpointing.errors import StoreUnfit
from checkpointing.stores.register import StoreRegister
from elastic3d.errors import UsageError
from elastic3d.integrations.accelerate import AcceleratorCheckpoints
from elastic3d.integrations.newest import newest_step
from tests.checkpointing.states import SMALL, make_state, save_and_commit
from tests.integrations.scripts import accelerate_ddp


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore")
        yield
    AcceleratorState._reset_state(reset_partial_state=True)


def test_an_interrupted_run_ends_with_the_same_bits(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Weights, optimizer, schedule and registered objects go on from the newest checkpoint."""
    whole = accelerate_ddp.main(str(tmp_path / "whole"), 8, 0.0)
    accelerate_ddp.main(str(tmp_path / "parts"), 5, 0.0)
    parts = accelerate_ddp.main(str(tmp_path / "parts"), 8, 0.0)
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    assert newest_step(str(tmp_path / "parts")) == 8
    assert "begin rank=0 world=1 step=4" in capfd.readouterr().out


def test_what_a_register_decides_is_refused_before_anything_is_trained(tmp_path: Path) -> None:
    """The job that has it would write over what the script commits."""
    register = StoreRegister(open_store(str(tmp_path / "register")))
    save_and_commit(open_store(str(tmp_path / "run"), register=register), make_state(SMALL, seed=1))
    with pytest.raises(StoreUnfit, match="a register decides here"):
        newest_step(str(tmp_path / "run"))


def prepared(**more: Any) -> Any:
    given: dict[str, Any] = {
        "_models": [torch.nn.Linear(1, 1)],
        "_optimizers": [],
        "_schedulers": [],
        "_custom_objects": [],
        "distributed_type": "DistributedType.NO",
    }
    return SimpleNamespace(**{**given, **more})


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"_models": []}, r"call accelerator\.prepare"),
        ({"distributed_type": "DistributedType.DEEPSPEED"}, "DEEPSPEED keeps its state by itself"),
        ({"_optimizers": [1, 2]}, "1 models and 2 optimizers"),
    ],
)
def test_what_cannot_be_saved_is_refused_at_once(more: dict[str, Any], words: str, tmp_path: Path) -> None:
    """Before anything is trained."""
    with pytest.raises(UsageError, match=words):
        AcceleratorCheckpoints(prepared(**more), tmp_path)


def test_the_scale_of_losses_goes_on(tmp_path: Path) -> None:
    """A run with mixed_precision="fp16" does not find it anew."""
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    scaler.scale(torch.ones(1))
    AcceleratorCheckpoints(prepared(scaler=scaler), tmp_path).save(3, wait=True)
    other = torch.amp.GradScaler("cpu", init_scale=2.0)
    other.scale(torch.ones(1))
    assert AcceleratorCheckpoints(prepared(scaler=other), tmp_path).restore() == 3
    assert other.get_scale() == 64.0


class Holder:
    """An object of the script's own, whose state is whatever it has."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


@pytest.mark.parametrize(
    ("fresh", "kept"),
    [
        ({"seen": {}}, {"seen": {"a": 1}}),
        ({"seen": {"a": 1}}, {"seen": {}}),
        ({"loader": None}, {"loader": {"samples": 7, 3: "an integer key"}}),
        ({"curves": []}, {"curves": [{"loss": 1.5}, {"loss": 1.25}]}),
        ({"best": None}, {"best": torch.tensor([1.5, 2.5])}),
        ({"last": [torch.zeros(3)]}, {"last": [torch.ones(2), torch.ones(4, dtype=torch.int64)]}),
        ({"ema": {"w": torch.zeros(2)}, "old": torch.zeros(1)}, {"ema": {"w": torch.ones(2)}}),
    ],
)
def test_the_state_of_an_object_may_grow_or_shrink(fresh: dict[str, Any], kept: dict[str, Any], tmp_path: Path) -> None:
    """What comes back is what was saved, whatever a fresh object has."""
    AcceleratorCheckpoints(prepared(), tmp_path, extra={"mine": Holder(kept)}).save(3, wait=True)
    other = Holder(fresh)
    assert AcceleratorCheckpoints(prepared(), tmp_path, extra={"mine": other}).restore() == 3
    assert str(other.state) == str(kept)


def test_an_object_that_a_checkpoint_does_not_have_is_named(tmp_path: Path) -> None:
    """And one that only the checkpoint has is left out."""
    AcceleratorCheckpoints(prepared(), tmp_path, extra={"one": Holder({"a": 1})}).save(3, wait=True)
    with pytest.raises(CheckpointException, match=r"skeleton/other"):
        AcceleratorCheckpoints(prepared(), tmp_path, extra={"other": Holder({"a": 2})}).restore()
    assert AcceleratorCheckpoints(prepared(), tmp_path).restore() == 3


def test_what_was_saved_before_the_first_step_is_loaded(tmp_path: Path) -> None:
    """Such as weights that rank 0 has drawn, or read from elsewhere."""
    kept, other = prepared(), prepared()
    AcceleratorCheckpoints(kept, tmp_path).save(0, wait=True)
    assert AcceleratorCheckpoints(other, tmp_path).restore() == 0
    assert torch.equal(other._models[0].weight, kept._models[0].weight)


class HalfUsed(torch.nn.Module):
    """A model of which a part has no gradient yet."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.later = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)

    def forward(self, given: torch.Tensor, *, whole: bool) -> torch.Tensor:
        made: torch.Tensor = self.later(self.used(given)) if whole else self.used(given)
        return made


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.NAdam])
def test_parameters_that_had_no_gradient_yet_begin_with_their_first(kind: Any, tmp_path: Path) -> None:
    """The optimizer has nothing of them, which hinders no restore, and changes no bit of what comes."""

    def made() -> tuple[HalfUsed, Any]:
        torch.manual_seed(1)
        model = HalfUsed()
        return model, kind(model.parameters(), lr=1e-2)

    def train(model: HalfUsed, optimizer: Any, *, whole: bool) -> None:
        for step in range(2):
            model(torch.full((1, 2), 1.5 + step), whole=whole).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    def checkpoints(model: HalfUsed, optimizer: Any) -> AcceleratorCheckpoints:
        given = prepared(_models=[model], _optimizers=[SimpleNamespace(optimizer=optimizer)])
        return AcceleratorCheckpoints(given, tmp_path)

    model, optimizer = made()
    train(model, optimizer, whole=False)
    checkpoints(model, optimizer).save(2, wait=True)
    train(model, optimizer, whole=True)
    again, other = made()
    assert checkpoints(again, other).restore() == 2
    train(again, other, whole=True)
    assert all(torch.equal(one, two) for one, two in zip(model.parameters(), again.parameters(), strict=True))


def test_another_optimizer_is_refused(tmp_path: Path) -> None:
    """It is not begun anew, as if none of its parameters had been trained."""
    model = torch.nn.Linear(1, 1)
    plain, adam = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.AdamW(model.parameters())
    given = [prepared(_models=[model], _optimizers=[SimpleNamespace(optimizer=one)]) for one in (plain, adam)]
    AcceleratorCheckpoints(given[0], tmp_path).save(2, wait=True)
    with pytest.raises(CheckpointException, match=r"Missing key .*optimizer0\."):
        AcceleratorCheckpoints(given[1], tmp_path).restore()

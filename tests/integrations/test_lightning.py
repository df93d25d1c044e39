"""The CheckpointIO for Lightning: what comes back, what is refused, and that no error of a save is lost."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning
import torch
from lightning_fabric.plugins import CheckpointIO
from torch.distributed.checkpoint import CheckpointException

from checkpointing import open_checkpoint, open_store
from elastic3d.errors import StateUnfit, UsageError
from elastic3d.integrations.lightning import checkpoint_io
from elastic3d.integrations.tree import put_together, taken_apart
from tests.integrations.scripts import lightning_ddp

assert pytorch_lightning


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore")
        yield


def checkpoint(step: int = 20) -> dict[str, Any]:
    """A checkpoint with all that Lightning's have: integer keys, lists, empty ones, a tensor at two places."""
    weight = torch.arange(6.0).reshape(2, 3)
    return {
        "epoch": 1,
        "global_step": step,
        "state_dict": {"layer.weight": weight, "tied.weight": weight, "half": weight.bfloat16()},
        "optimizer_states": [{"state": {0: {"step": torch.tensor(3.0), "exp_avg": weight * 2}}, "param_groups": [{}]}],
        "lr_schedulers": [],
        "loops": {"fit_loop": {"state_dict": {}, "batch": {"ready": step, "done": None}}},
        "callbacks": {"ModelCheckpoint{'monitor': None}": {"best_model_score": None, "kth": {}}},
        "hyper_parameters": {"width": 3, "betas": (0.9, 0.95)},
    }


class Strange:
    """What no checkpoint can hold."""


def same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            same(one[key], other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for first, second in zip(one, other, strict=True):
            same(first, second)
    elif isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    else:
        assert one == other


@pytest.mark.parametrize("background", [True, False])
def test_a_checkpoint_comes_back_as_it_was(background: bool, tmp_path: Path) -> None:
    """By its path, by what `newest` says, and as the last; changes made after the call are not in it."""
    io = checkpoint_io(tmp_path / "store", background=background)
    assert isinstance(io, CheckpointIO)
    assert io.newest() is None
    given, expected = checkpoint(), checkpoint()
    io.save_checkpoint(given, "anywhere/epoch=1-step=20.ckpt")
    given["state_dict"]["layer.weight"].fill_(9.0)
    io.teardown()
    other = checkpoint_io(tmp_path / "store")
    assert other.newest() == "step=20.ckpt"
    for path in ("anywhere/epoch=1-step=20.ckpt", "step=20.ckpt", Path("x") / "last.ckpt"):
        same(other.load_checkpoint(path), expected)
    keys = open_checkpoint(open_store(str(tmp_path / "store"), write=False)).specs.keys()
    assert {"state_dict.layer.weight", "state_dict.half", "optimizer_states.0.state.0.exp_avg"} <= keys


@pytest.mark.parametrize(
    "name",
    [
        "epoch=0-val_loss_step=0.42-step=20.ckpt",
        "step=20-loss_step=3.5-v1.ckpt",
        "warmup_step=5-step20.ckpt",
        "mystep=20.ckpt",
        "a_step=3-b_step20.ckpt",
    ],
)
def test_the_step_of_a_name_is_not_that_of_a_metric(name: str, tmp_path: Path) -> None:
    """Whatever else ModelCheckpoint writes into it, the path that it has written finds the checkpoint again."""
    io = checkpoint_io(tmp_path / "store", background=False)
    io.save_checkpoint(checkpoint(20), name)
    assert io.load_checkpoint(name)["global_step"] == 20


def test_an_interrupted_run_ends_with_the_same_bits(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Weights, optimizer, schedule and loops go on."""
    whole = lightning_ddp.main(str(tmp_path / "whole"), 14, 0.0)
    lightning_ddp.main(str(tmp_path / "parts"), 6, 0.0)
    parts = lightning_ddp.main(str(tmp_path / "parts"), 14, 0.0)
    for one, other in zip(whole.parameters(), parts.parameters(), strict=True):
        assert torch.equal(one, other)
    said = capfd.readouterr().out
    assert "begin rank=0 world=1 step=6" in said


def test_old_ones_go_when_so_many_are_kept(tmp_path: Path) -> None:
    """And their objects, once the grace is over; Lightning's own removals change nothing."""
    io = checkpoint_io(tmp_path / "store", keep=2, background=False, grace=0.0)
    for step in (2, 4, 6, 8):
        io.save_checkpoint(checkpoint(step), f"step={step}.ckpt")
        io.remove_checkpoint("step=8.ckpt")
    assert io.load_checkpoint("step=6.ckpt")["global_step"] == 6
    with pytest.raises(CheckpointException):
        io.load_checkpoint("step=2.ckpt")


def test_a_save_stands_where_old_ones_cannot_be_removed(tmp_path: Path) -> None:
    """One of those that are kept cannot be read: it is a warning, and training goes on."""
    io = checkpoint_io(tmp_path / "store", keep=2, background=False, grace=0.0)
    for step in (2, 4):
        io.save_checkpoint(checkpoint(step), f"step={step}.ckpt")
    record = open_checkpoint(open_store(str(tmp_path / "store"), write=False)).name
    for file in (tmp_path / "store").rglob(f"*{record}*"):
        file.chmod(0o644)
        file.write_bytes(b"{}")
    with pytest.warns(UserWarning, match="checkpoints beyond keep= stay for now"):
        io.save_checkpoint(checkpoint(6), "step=6.ckpt")
    assert io.load_checkpoint("step=6.ckpt")["global_step"] == 6


def test_a_damaged_checkpoint_is_not_loaded(tmp_path: Path) -> None:
    """Every tile has a digest."""
    io = checkpoint_io(tmp_path / "store", background=False)
    io.save_checkpoint(checkpoint(), "step=20.ckpt")
    (pack,) = (tmp_path / "store").rglob("*.pack")
    data = bytearray(pack.read_bytes())
    data[len(data) // 3] ^= 4
    pack.chmod(0o644)
    pack.write_bytes(data)
    with pytest.raises(CheckpointException):
        checkpoint_io(tmp_path / "store").load_checkpoint("step=20.ckpt")


def test_an_error_of_a_save_in_the_background_is_raised_by_the_next(tmp_path: Path) -> None:
    """Or at the end; the one after it is saved."""
    io = checkpoint_io(tmp_path / "store")
    io.save_checkpoint({**checkpoint(2), "hyper_parameters": Strange()}, "step=2.ckpt")
    with pytest.raises(CheckpointException, match=r"skeleton/hyper_parameters"):
        io.save_checkpoint(checkpoint(4), "step=4.ckpt")
    io.save_checkpoint(checkpoint(6), "step=6.ckpt")
    io.teardown()
    assert io.newest() == "step=6.ckpt"


def test_what_could_not_be_found_again_is_refused(tmp_path: Path) -> None:
    """Names without a step, options of the store, and a key that stands for a tensor."""
    io = checkpoint_io(tmp_path / "store")
    for name in ("best.ckpt", "epoch=1-step=3.ckpt", "loss_step=0.5.ckpt"):
        with pytest.raises(UsageError, match=rf"'{re.escape(name)}' does not name.*\{{epoch\}}-\{{step\}}"):
            io.save_checkpoint(checkpoint(), f"x/{name}")
    with pytest.raises(UsageError, match="names no step"):
        io.load_checkpoint("best.ckpt")
    with pytest.raises(UsageError, match="belong to its URL"):
        io.save_checkpoint(checkpoint(), "step=1.ckpt", storage_options={"a": 1})
    with pytest.raises(StateUnfit, match=r"callbacks\.mine .*\$tensor"):
        taken_apart({"callbacks": {"mine": {"$tensor": 1}}})
    assert put_together(taken_apart({})) == {}


def test_no_two_places_have_one_name() -> None:
    """Keys with dots or slashes, numbers beside the same in text, and what looks like a skeleton of ours."""
    one, two, three, four = (torch.full((1,), float(number)) for number in range(4))
    given = {"a": {"b.c": one, "b": {"c": two}, 1: three, "1": four, "b/c": two + 5}, "skeleton/a": one + 7}
    again = put_together(taken_apart(given))
    assert str(again) == str(given)

"""A run whose store holds another tool's checkpoint starts at step 0 with those weights, or says why not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpointing import open_store
from checkpointing.interchange import import_checkpoint
from elastic3d.distrust import Distrust
from elastic3d.errors import StateError
from elastic3d.port import Go, LocalState, StateRestored
from elastic3d.training import Run
from elastic3d.training.standalone import StandalonePort
from elastic3d.training.tiers import KeepersAndStore
from elastic3d.values import StoreAt
from tests.parallel.models import Model, Sentences, loss_fn


class Host(StandalonePort):
    """A port with a store, which records its reports."""

    def __init__(self, url: str, distrusted: tuple[Distrust, ...]) -> None:
        super().__init__()
        self.distrusted = distrusted
        self.assignment = replace(self.assignment, store=StoreAt(url=url))
        self.began: list[tuple[str, int]] = []
        self.facts: list[dict[str, Any]] = []

    def await_go(self) -> Go:
        return Go(servers=(), distrusted=self.distrusted)

    def restored(self, state: StateRestored) -> None:
        self.began.append((state.source, state.step))

    def snapshot(self, state: LocalState, *, checkpoint: bool, wait: bool) -> None:
        self.facts.append(state.facts)


def begin(url: Path, distrusted: tuple[Distrust, ...] = ()) -> tuple[Host, Any]:
    """Make one step of a run; return the observations of its host, and the initial weights."""
    host = Host(str(url), distrusted)
    run = Run(host, tiers=KeepersAndStore("run"))
    model = run.shard(Model)
    optimizer = torch.optim.AdamW(model.parameters())
    batches = run.batches(Sentences(), global_batch=4, micro_batch=2)
    run.restore(model=model, optimizer=optimizer, batches=batches)
    weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
    loss = run.backward(model, next(batches.until(step=1)), loss_fn)
    run.step(optimizer, loss=loss)
    assert run.steps == 1
    return host, weights


def trained() -> dict[str, torch.Tensor]:
    torch.manual_seed(99)
    return Model().state_dict()


@pytest.mark.parametrize(
    ("nested", "dtype"), [(False, torch.float32), (True, torch.float32), (False, torch.bfloat16)], ids=str
)
def test_a_run_starts_at_step_0_with_imported_weights(nested: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    """Imported as any step, under the model's names or those of a nested state, widened if narrow.

    No rule about what devices of the run computed is about them.
    """
    saved = {name: value.to(dtype) for name, value in trained().items()}
    torch.save({"model": saved, "epoch": 3} if nested else saved, tmp_path / "in.pt")
    import_checkpoint("torch", tmp_path / "in.pt", open_store(str(tmp_path / "store")), step=1200)
    host, weights = begin(tmp_path / "store", distrusted=(Distrust(before=9, step=0),))
    assert host.began == [("store", 0)]
    assert host.facts[0]["step"] == 0
    assert weights.keys() == saved.keys()
    assert all(torch.equal(weights[name], saved[name].float()) for name in saved)


def test_weights_that_do_not_fit_are_named(tmp_path: Path) -> None:
    """The error says what is missing, of another shape, or would be rounded, and what to do."""
    saved = trained()
    del saved["norm.bias"]
    saved |= {"head.bias": torch.zeros(3), "scale": torch.ones(2).double(), "other": torch.ones(1)}
    torch.save(saved, tmp_path / "in.pt")
    import_checkpoint("torch", tmp_path / "in.pt", open_store(str(tmp_path / "store")))
    with pytest.raises(StateError) as raised:
        begin(tmp_path / "store")
    said = str(raised.value)
    assert "3 tensors of the model do not fit" in said
    assert "norm.bias is not there" in said
    assert "head.bias is float32 [3] there, float32 [29] here" in said
    assert "scale is float64 [2] there, float32 [2] here" in said
    assert "elastic3d ckpt import" in said


def test_exported_weights_of_a_run_are_weights(tmp_path: Path) -> None:
    """An export of `model/` has the facts of its run beside it, and no state of a run: another one starts at step 0."""
    torch.save(trained(), tmp_path / "in.pt")
    facts = {"step": 7, "order": {"length": 3, "global_batch": 1, "micro_batch": 1, "seed": 0}, "ledger": []}
    import_checkpoint("torch", tmp_path / "in.pt", open_store(str(tmp_path / "store")), step=7, facts=facts)
    host, weights = begin(tmp_path / "store")
    assert (host.began, host.facts[0]["step"]) == ([("store", 0)], 0)
    assert all(torch.equal(weights[name], value) for name, value in trained().items())


@pytest.mark.parametrize("name", ["model.safetensors", "model-00001-of-00002.safetensors", "pytorch_model.bin"])
def test_a_folder_that_was_not_imported_is_not_taken_for_an_empty_store(name: str, tmp_path: Path) -> None:
    """Its weights would be ignored, and nobody would know; the error says how to start from them."""
    (tmp_path / name).write_bytes(b"weights")
    with pytest.raises(StateError, match=rf"another tool's \({name}\).* `elastic3d ckpt import NEW-STORE"):
        begin(tmp_path)


def test_other_files_in_a_store_are_nobodys_weights(tmp_path: Path) -> None:
    """Such as notes, and what the script itself saves."""
    (tmp_path / "notes.txt").write_text("7")
    (tmp_path / "best.pt").write_bytes(b"")
    assert begin(tmp_path)[0].began == [("none", 0)]

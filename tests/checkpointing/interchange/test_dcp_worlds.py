"""DCP states of real worlds through our Writer and Reader."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from checkpointing import open_checkpoint, open_store, verify
from checkpointing.interchange import Reader
from tests.checkpointing.interchange import mains
from tests.checkpointing.interchange.samples import same
from tests.checkpointing.interchange.worlds import run_ranks

pytestmark = [pytest.mark.gloo, pytest.mark.usefixtures("server"), pytest.mark.long]


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """Load in the test's own process on purpose."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def test_fsdp_states_are_restored_on_another_number_of_ranks(tmp_path: Path) -> None:
    """Parameters, optimizer (as a tree and flat) and objects of four ranks are restored on two, bit for bit."""
    url = str(tmp_path)
    tree, first, flat, second = run_ranks(mains.save_fsdp, 4, url)[0]
    for loaded in run_ranks(mains.load_fsdp, 2, url, [first, second]):
        same(loaded, [tree, flat])
    store = open_store(url, write=False)
    assert not list(verify(store))
    # Tensors that did not change between the two saves are stored once.
    one, two = open_checkpoint(store, first), open_checkpoint(store, second)
    kept = {tile.pack for tile in one.tiles}
    assert all(tile.pack in kept for tile in two.tiles if tile.spec.key.startswith("model."))


def test_a_tensor_parallel_and_sharded_model_loads_in_one_process(tmp_path: Path) -> None:
    """Shards of a 2 x 2 mesh, strided ones too, are boxes of their tensors."""
    saved = run_ranks(mains.save_two_dims, 4, str(tmp_path))[0]
    state = {"model": mains.build(seed=9).state_dict()}
    dcp.load(state, storage_reader=Reader(str(tmp_path)))
    same({"model": dict(state["model"])}, saved)


def test_pipeline_stages_save_one_checkpoint(tmp_path: Path) -> None:
    """Ranks with different tensors and objects save together; neither rank nor stage is part of a name."""
    run_ranks(mains.save_stages, 2, str(tmp_path))
    state = {f"blocks.{n}.weight": torch.zeros(3, 2) for n in range(2)} | {f"blocks.{n}.note": "" for n in range(2)}
    state["step"] = torch.tensor(0)
    dcp.load(state, storage_reader=Reader(str(tmp_path)))
    for n in range(2):
        assert torch.equal(state[f"blocks.{n}.weight"], torch.full((3, 2), float(n)))
        assert state[f"blocks.{n}.note"] == f"stage {n}"
    assert state["step"] == 7


def test_an_asynchronous_save_holds_the_state_at_its_start(tmp_path: Path) -> None:
    """Parameters that change meanwhile do not change in it."""
    before = run_ranks(mains.save_async, 2, str(tmp_path))[0]
    model = mains.build(seed=9)
    state = mains.state_of(model, mains.train(model), True, {**mains.EXTRA})
    dcp.load(state, storage_reader=Reader(str(tmp_path)))
    same(mains.whole(state), before)


def test_an_older_writer_is_fenced_out(tmp_path: Path) -> None:
    """A job presumed dead cannot move `latest` once another has saved, and every rank is told."""
    assert run_ranks(mains.save_twice_as_rivals, 2, str(tmp_path)) == [["Fenced"], ["Fenced"]]
    assert open_checkpoint(open_store(str(tmp_path), write=False)).step == 2

"""The ranks of the tests' worlds: train a little under some layout, save with DCP, load with DCP."""

from __future__ import annotations

import time
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from checkpointing.interchange import Reader, Writer


def build(seed: int) -> nn.Module:
    """Return a model whose sizes are divisible by no number of ranks."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 7), nn.LayerNorm(7))


def train(model: nn.Module) -> torch.optim.Optimizer:
    """Take one step, so that the optimizer has state."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(torch.ones(3, 6)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def whole(state: Any) -> Any:
    """Return nested state with every tensor whole, on every rank."""
    if isinstance(state, DTensor):
        return state.full_tensor()
    if isinstance(state, dict):
        return {key: whole(value) for key, value in state.items()}
    if isinstance(state, list):
        return [whole(value) for value in state]
    return state.detach().clone() if isinstance(state, torch.Tensor) else state


def sharded(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a trained FSDP2 model with its optimizer."""
    model = build(seed)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, train(model)


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, flat: bool, extra: Any) -> dict[str, Any]:
    """Return model, optimizer and a few other values, as people save them."""
    parameters, moments = get_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=flat))
    return {"model": parameters, "optimizer": moments, "extra": extra}


EXTRA = {"epoch": 3, "name": "größe", "betas": (0.9, 0.95), "sizes": [1, 2.5, None], "rng": torch.arange(5)}


def save_fsdp(url: str) -> list[Any]:
    """Save twice with one Writer: the optimizer as a tree, then flat."""
    model, optimizer = sharded(seed=1)
    writer, saved = Writer(url), []
    for step, flat in enumerate((False, True), start=1):
        state = state_of(model, optimizer, flat, EXTRA)
        dcp.save(state, storage_writer=writer, checkpoint_id=str(step))
        saved.append(whole(state))
        saved.append(writer.committed and writer.committed.checkpoint)
    return saved


def load_fsdp(url: str, names: list[str]) -> list[Any]:
    """Load both into a model trained from another seed."""
    loaded = []
    reader = Reader(url)
    for name, flat in zip(names, (False, True), strict=True):
        model, optimizer = sharded(seed=2)
        state = state_of(model, optimizer, flat, {**EXTRA, "epoch": 0, "betas": None, "rng": torch.zeros(5).long()})
        dcp.load(state, storage_reader=reader, checkpoint_id=name)
        options = StateDictOptions(flatten_optimizer_state_dict=flat)
        set_state_dict(
            model,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=options,
        )
        loaded.append(whole(state_of(model, optimizer, flat, state["extra"])))
    return loaded


def save_two_dims(url: str) -> Any:
    """Save a model that is cut by tp and then by FSDP2, over a mesh of 2 x 2, one stage of it from each row."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = build(seed=3)
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    state = {"model": model.state_dict()}
    dcp.save(state, storage_writer=Writer(url, step=1))
    return whole(state)


def save_stages(url: str) -> None:
    """Save a pipeline: each rank has its own blocks under the model's names, and says which they are."""
    rank = dist.get_rank()
    blocks = {f"blocks.{rank}.weight": torch.full((3, 2), float(rank)), f"blocks.{rank}.note": f"stage {rank}"}
    dcp.save({**blocks, "step": torch.tensor(7)}, storage_writer=Writer(url, step=1))


def save_async(url: str) -> Any:
    """Save in the background while the parameters already change."""
    model, optimizer = sharded(seed=4)
    state = state_of(model, optimizer, True, EXTRA)
    before = whole(state)
    saving = dcp.async_save(state, storage_writer=Writer(url, step=1))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    saving.result()
    return before


def save_twice_as_rivals(url: str) -> list[str]:
    """Save with an old Writer after a new one has begun; return the error of the old one's save."""
    state = {"w": torch.ones(4)}
    old, new = Writer(url), Writer(url)
    dcp.save(state, storage_writer=old, checkpoint_id="1")
    dcp.save(state, storage_writer=new, checkpoint_id="2")
    try:
        dcp.save(state, storage_writer=old, checkpoint_id="3")
    except dcp.CheckpointException as error:
        return [type(failure[0]).__name__ for failure in error.failures.values()]
    return []


def save_overlapping(url: str) -> None:
    """Request three saves at once; one rank begins each of them late."""
    writer, saves = Writer(url), []
    for step in (1, 2, 3):
        saves.append(
            dcp.async_save(
                {"w": torch.full((4,), float(step))},
                storage_writer=writer,
                checkpoint_id=str(step),
                planner=Late(step if dist.get_rank() == 0 else 4 - step),
            )
        )
    for save in saves:
        assert isinstance(save, Future)
        save.result()


class Late(DefaultSavePlanner):
    """A slow planner."""

    def __init__(self, tenths: int) -> None:
        super().__init__()
        self._tenths = tenths

    def create_local_plan(self) -> SavePlan:
        time.sleep(self._tenths / 10)
        return super().create_local_plan()

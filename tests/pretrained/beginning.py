"""Runs of one rank, in this process, that begin with weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from checkpointing import Piece, commit, open_checkpoint, open_store, read_latest, save_rank
from checkpointing.interchange.tensors import buffer_of
from checkpointing.saving.save import SavedRank
from elastic3d.port import LocalState, StateRestored
from elastic3d.provenance.record import spelled_out
from elastic3d.training import Run
from elastic3d.training.standalone import StandalonePort
from elastic3d.training.tiers import KeepersAndStore
from elastic3d.values import StoreAt
from tests.parallel.architectures.families import logits_loss
from tests.parallel.models import Sentences


class Host(StandalonePort):
    """A port that records how a run begins, and commits a checkpoint of every state if it has a store."""

    def __init__(self, store: Path | None = None, *, measuring: bool = False) -> None:
        super().__init__()
        at = None if store is None else StoreAt(url=str(store))
        self.assignment = replace(self.assignment, store=at, measuring=measuring, snapshot_every=1)
        self.opened = None if store is None else open_store(str(store))
        self.began: list[StateRestored] = []
        self.saved: list[SavedRank] = []
        self.facts: list[dict[str, Any]] = []

    def restored(self, state: StateRestored) -> None:
        self.began.append(state)

    def snapshot(self, state: LocalState, *, checkpoint: bool, wait: bool) -> None:
        self.facts.append(state.facts)
        if self.opened is None:
            return
        ref, step = read_latest(self.opened), state.step
        parent = None if ref is None or ref.checkpoint is None else open_checkpoint(self.opened)
        if parent is not None and parent.step == step:
            return
        pieces = [Piece(spec=spec, box=box, data=buffer_of(tensor.contiguous())) for spec, box, tensor in state.tiles]
        place: Any = {"step": step, "made_in": 1, "attempt": 0, "world": 1}
        facts = spelled_out(state.facts)
        self.saved.append(save_rank(self.opened, **place, rank=0, pieces=pieces, facts=facts, parent=parent))
        commit(self.opened, **place, committed_in=1)


def begin(
    build: Callable[[], nn.Module],
    weights: Any,
    *,
    steps: int = 0,
    store: Path | None = None,
    before: Callable[[nn.Module], object] = lambda model: None,
    accept: Any = (),
    **options: Any,
) -> tuple[Host, nn.Module]:
    """Begin a run; return what its host saw, and the model. options: of `run.shard`."""
    host = Host(store)
    run = Run(host, tiers=KeepersAndStore(None))
    model = run.shard(build, seed=3, weights=weights, **options)
    before(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    batches = run.batches(Sentences(), global_batch=8, micro_batch=2, seed=11)
    run.restore(model=model, optimizer=optimizer, batches=batches, accept=accept)
    for batch in batches.until(step=steps):
        run.step(optimizer, loss=run.backward(model, batch, logits_loss))
    return host, model


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of all tensors of a model's state."""
    return {name: value.detach().clone() for name, value in model.state_dict().items()}

"""Runs of one rank, in this process, that begin with weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from elastic3d.port import LocalState, StateRestored
from elastic3d.training import Run
from elastic3d.training.standalone import StandalonePort
from elastic3d.training.tiers import KeepersAndStore
from elastic3d.values import StoreAt
from tests.parallel.architectures.families import logits_loss
from tests.parallel.models import Sentences


class Host(StandalonePort):
    """A port that records what a run says of its beginning."""

    def __init__(self, store: Path | None = None, *, measuring: bool = False) -> None:
        super().__init__()
        at = None if store is None else StoreAt(url=str(store))
        self.assignment = replace(self.assignment, store=at, measuring=measuring)
        self.began: list[StateRestored] = []
        self.states: list[LocalState] = []

    def restored(self, state: StateRestored) -> None:
        self.began.append(state)

    def snapshot(self, state: LocalState, *, checkpoint: bool, wait: bool) -> None:
        self.states.append(state)


def begin(
    build: Callable[[], nn.Module],
    weights: Any,
    *,
    steps: int = 0,
    store: Path | None = None,
    before: Callable[[nn.Module], object] = lambda model: None,
    **options: Any,
) -> tuple[Host, nn.Module]:
    """Begin a run; return what its host saw, and the model. options: of `run.shard`."""
    host = Host(store)
    run = Run(host, tiers=KeepersAndStore(None))
    model = run.shard(build, seed=3, weights=weights, **options)
    before(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    batches = run.batches(Sentences(), global_batch=8, micro_batch=2, seed=11)
    run.restore(model=model, optimizer=optimizer, batches=batches)
    for batch in batches.until(step=steps):
        run.step(optimizer, loss=run.backward(model, batch, logits_loss))
    return host, model


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of all tensors of a model's state."""
    return {name: value.detach().clone() for name, value in model.state_dict().items()}

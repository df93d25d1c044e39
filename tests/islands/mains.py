"""Mains for worlds that are islands: importable, like a user's script."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch

from elastic3d.data import check
from elastic3d.parallel.digest import state_digest
from elastic3d.training import Run
from tests.parallel.models import Model, Sentences, loss_fn

EVERY, ROUNDS = 3, 4
GLOBAL_BATCH, MICRO_BATCH = 4, 2
SEED, DATA_SEED = 3, 11
RATE, PERIOD = 1e-2, 20


def build() -> Model:
    """Return the model, which draws nothing while it trains."""
    return Model(depth=2, dropout=0.0)


def tools(model: torch.nn.Module) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """Return the inner optimizer and its schedule."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=PERIOD)


def train(
    run: Run,
    *,
    steps: int = EVERY * ROUNDS,
    die_at: int = 0,
    wait_at: tuple[int, str] = (0, ""),
    depth: int = 2,
    pause: float = 0.0,
) -> tuple[str, str, bool]:
    """Train; return the digest of the weights, that of weights and inner optimizer, and whether the ledger is whole.

    die_at: a step after which the process is gone, without a word. wait_at: a step before which it waits for a file.
    pause: seconds before each step.
    """
    model = run.shard(lambda: Model(depth=depth, dropout=0.0), blocks="blocks", seed=SEED)
    optimizer, schedule = tools(model)
    batches = run.batches(Sentences(), global_batch=GLOBAL_BATCH, micro_batch=MICRO_BATCH, seed=DATA_SEED)
    run.restore(model=model, optimizer=optimizer, schedule=schedule, batches=batches)
    for batch in batches.until(step=steps):
        time.sleep(pause)
        if run.steps == wait_at[0] and wait_at[1]:
            while not Path(wait_at[1]).exists():
                os.sched_yield()
        run.step(optimizer, schedule, loss=run.backward(model, batch, loss_fn))
        if run.steps == die_at:
            os._exit(0)
    mesh = run._made().mesh
    whole = check(run.ledger, batches.order).whole
    return state_digest(mesh, model, None), state_digest(mesh, model, optimizer), whole

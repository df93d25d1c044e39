"""Mains for the tests' worlds: importable, as a user's script is."""

from __future__ import annotations

import torch

from elastic3d.run import Run
from tests.parallel.models import Model, Sentences, loss_fn

STEPS = 4


def train(run: Run, *, steps: int = STEPS, dtype: torch.dtype = torch.float32) -> str:
    """Train the small model with dropout, clipping, a schedule and 7 micro-batches a step; return the digest."""
    model = run.shard(lambda: Model(dtype=dtype), blocks="blocks", seed=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
    batches = run.batches(Sentences(), global_batch=14, micro_batch=2, seed=11)
    run.restore(model=model, optimizer=optimizer, schedule=schedule, batches=batches)
    for batch in batches.until(step=steps):
        loss = run.backward(model, batch, loss_fn)
        run.step(optimizer, schedule, loss=loss, clip=0.5)
    return run.digest()

"""Mains that return what their rank has recorded of its progress."""

from __future__ import annotations

from typing import Any

import torch

from elastic3d.health.record import ProgressRecord, parse, programs
from elastic3d.training import Run
from tests.parallel.models import Model, Sentences, loss_fn

STEPS = 3

Program = tuple[tuple[int, int], ...]


def ordered(run: Run) -> list[tuple[ProgressRecord, Program]]:
    """Train, and return after each step the record and the step's program."""
    return _trained(run, "ordered")


def fast(run: Run) -> list[tuple[ProgressRecord, Program]]:
    """The same with the backend's own reduction."""
    return _trained(run, "fast")


def compressed(run: Run) -> list[tuple[ProgressRecord, Program]]:
    """The same with gradients in 16 bits."""
    return _trained(run, "fast", compress="bf16")


def _trained(run: Run, reduction: str, compress: str | None = None) -> list[tuple[ProgressRecord, Program]]:
    model = run.shard(lambda: Model(dropout=0.0), blocks="blocks", seed=3, reduction=reduction, compress=compress)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batches = run.batches(Sentences(), global_batch=16, micro_batch=2, seed=11)
    run.restore(model=model, optimizer=optimizer, batches=batches)
    port: Any = run._port
    seen = []
    for batch in batches.until(step=STEPS):
        run.step(optimizer, loss=run.backward(model, batch, loss_fn), clip=0.5)
        record = parse(port.page[:])
        assert record is not None
        seen.append((record, programs(port.page[:])[1]))
    return seen

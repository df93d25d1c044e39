"""Mains whose steps are measured; the passes of one rank take longer."""

from __future__ import annotations

from typing import Any

import torch

from chaos.gpu.emulated_device import EmulatedDevice
from elastic3d.clock import SYSTEM
from elastic3d.parallel.pipeline.stages import Absent
from elastic3d.training import Run
from tests.parallel.models import Model, Sentences, loss_fn

STEPS = 40
LONGER = 0.15
BLOCK = 0.01
SLOW = 1


def train(run: Run) -> None:
    """Train; each forward pass of rank `SLOW` takes longer, from the first step on."""
    model = run.shard(lambda: Model(dropout=0.0), blocks="blocks", seed=3)
    if run.rank == SLOW:
        model.register_forward_pre_hook(lambda *given: SYSTEM.sleep(LONGER))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    batches = run.batches(Sentences(), global_batch=4, micro_batch=2, seed=11)
    run.restore(model=model, optimizer=optimizer, batches=batches)
    for batch in batches.until(step=STEPS):
        run.step(optimizer, loss=run.backward(model, batch, loss_fn))


def train_stages(run: Run) -> None:
    """Train in stages; each block takes as long as any other, and on rank `SLOW` three times as long."""
    model = run.shard(lambda: Model(dropout=0.0), blocks="blocks", seed=3)
    for block in (block for block in model.blocks if not isinstance(block, Absent)):
        block.register_forward_hook(lambda *given: SYSTEM.sleep(3 * BLOCK if run.rank == SLOW else BLOCK))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    batches = run.batches(Sentences(), global_batch=4, micro_batch=2, seed=11)
    run.restore(model=model, optimizer=optimizer, batches=batches)
    for batch in batches.until(step=STEPS):
        run.step(optimizer, loss=run.backward(model, batch, loss_fn))


def train_on_devices(run: Run) -> None:
    """Train beside an emulated device; the calls of all passes return at once, and those of rank `SLOW` take longer."""
    port: Any = run._port
    port.device = device = EmulatedDevice(run.rank, late=0.0)
    model = run.shard(lambda: Model(dropout=0.0), blocks="blocks", seed=3)
    model.register_forward_pre_hook(lambda *given: device.compute(LONGER if run.rank == SLOW else 0.0))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    batches = run.batches(Sentences(), global_batch=4, micro_batch=2, seed=11)
    run.restore(model=model, optimizer=optimizer, batches=batches)
    for batch in batches.until(step=STEPS):
        run.step(optimizer, loss=run.backward(model, batch, loss_fn))

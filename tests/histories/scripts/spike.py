"""A script some of whose steps have samples that make the loss jump up; a trainer may be killed while it goes back."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch
from torch import nn

import elastic3d
from elastic3d.data import Order

STEPS, OUT = int(sys.argv[1]), Path(sys.argv[2])
EXCLUDE = json.loads(os.environ.get("EXCLUDE", "[]"))
BATCH, LENGTH, SEED = 12, 1200, 5
FIRST, BACK = 50, 20
KILLED = OUT / "killed"


def bad() -> set[int]:
    """Return the samples of the four steps from `FIRST` on."""
    order = Order(length=LENGTH, global_batch=BATCH, micro_batch=2, seed=SEED)
    return {int(one) for one in order.samples(order.positions(FIRST)[0], order.positions(FIRST + 3)[1])}


def main(run: elastic3d.Run) -> None:
    model = run.shard(lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)), seed=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    drawn, far = torch.randn(LENGTH, 8, generator=torch.Generator().manual_seed(1)), bad()
    data = [(x, torch.full((4,), 90.0) if number in far else x[:4]) for number, x in enumerate(drawn)]
    batches = run.batches(data, global_batch=BATCH, micro_batch=2, seed=SEED, exclude=EXCLUDE)
    run.restore(model=model, optimizer=optimizer, batches=batches)
    for batch in batches.until(step=STEPS):
        # The second time it is among the steps that are left out, or just behind them.
        if str(batch.step) == os.environ.get("KILL") and run.generation > 1 and run.rank == 1 and not KILLED.exists():
            KILLED.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        run.step(optimizer, loss=run.backward(model, batch, nn.functional.mse_loss), clip=1.0)
    digest = run.digest()
    if run.rank == 0:
        (OUT / "digest").write_text(digest)


if __name__ == "__main__":
    elastic3d.run(
        main,
        layout=elastic3d.Layout.parse("pp=1"),
        events=os.environ.get("EVENTS"),
        snapshot_every=1,
        store=os.environ.get("STORE"),
        every=5,
        health=elastic3d.Health(spike="rollback", rollback_steps=BACK),
    )

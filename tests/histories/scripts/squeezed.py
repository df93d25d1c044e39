"""A script that needs memory within its passes, of which it gives back all, and holds little between two steps.

Each step is followed by a pause, so that whatever is done after a step finds it between two of them.
"""

from __future__ import annotations

import ctypes
import sys
import time

import torch
from short_of_memory import TOKENS, Model

import elastic3d

STEPS, PAUSE = int(sys.argv[1]), float(sys.argv[2])
_MMAP_THRESHOLD = -3
"""mallopt's name of the size from which on memory goes back to the kernel as soon as it is free."""


def main(run: elastic3d.Run) -> None:
    model = run.shard(Model, blocks="blocks", seed=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = [(torch.randn(TOKENS, 8, generator=torch.Generator().manual_seed(i)), torch.zeros(4)) for i in range(12)]
    batches = run.batches(data, global_batch=6, micro_batch=2, seed=5)
    run.restore(model=model, optimizer=optimizer, batches=batches)
    for batch in batches.until(step=STEPS):
        run.step(optimizer, loss=run.backward(model, batch, lambda y, t: (y.mean(1) - t).square().mean()), clip=0.5)
        time.sleep(PAUSE)


if __name__ == "__main__":
    ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 1 << 16)
    elastic3d.run(main, health=elastic3d.Health(slow="off"))

"""Train with plain DDP under torchrun: no elastic3d, a checkpoint of its own every few steps, and lines of its steps.

    train_ddp.py OUT STEPS [SECONDS_PER_STEP]

What it computes does not depend on how many ranks there are: each takes its share of the same samples, in float64, and
the digest in OUT/result.json is of rounded parameters.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

BATCH, EVERY = 12, 5
"""Samples of a step; steps between checkpoints."""


def main(out: Path, steps: int, pause: float) -> None:
    """Train up to step `steps`, from the newest checkpoint in `out` on."""
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(17)
    net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)).double()
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    begin = restore(out, net, optimizer)
    for step in range(begin + 1, steps + 1):
        time.sleep(pause)
        chance = torch.Generator().manual_seed(step)
        samples = torch.randn(BATCH, 8, generator=chance, dtype=torch.float64)[rank::world]
        # DDP averages over ranks, whose shares need not be equal: so it is the mean over all samples.
        loss = (model(samples) - samples.sum(1, keepdim=True)).square().sum() * world / BATCH
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        dist.all_reduce(loss := loss.detach() / world)
        if rank == 0:
            print(f"step {step} loss {loss.item():.6f}", flush=True)
            if step % EVERY == 0 or step == steps:
                save(
                    out / "checkpoint.pt", {"step": step, "net": net.state_dict(), "optimizer": optimizer.state_dict()}
                )
    if rank == 0:
        rounded = b"".join(one.detach().round(decimals=6).numpy().tobytes() for one in net.parameters())
        (out / "result.json").write_text(json.dumps({"digest": hashlib.sha256(rounded).hexdigest()}) + "\n")
    # DDP's reducer would otherwise be the last to let go of the group, and hold the interpreter's lock meanwhile. That
    # waits for gloo's threads, which may want the lock to let go of tensors (pytorch/pytorch#56297).
    del model
    dist.destroy_process_group()


def restore(out: Path, net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the newest checkpoint and return its step; 0 where there is none."""
    if not (out / "checkpoint.pt").exists():
        return 0
    state = torch.load(out / "checkpoint.pt")
    net.load_state_dict(state["net"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])


def save(path: Path, state: object) -> None:
    """Write a checkpoint, whole or not at all."""
    torch.save(state, path.with_suffix(".part"))
    os.replace(path.with_suffix(".part"), path)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]) if len(sys.argv) > 3 else 0.0)

"""A training script as anybody would write it for torchrun, without elastic3d.

python foreign_ddp.py DIRECTORY SECONDS_PER_STEP: trains until DIRECTORY/stop exists, saving its step and model to
DIRECTORY/checkpoint. Each worker reports what it does in single lines, which the tests read. Ranks end a second apart.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main(directory: Path, pause: float) -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    step = 0
    if (directory / "checkpoint").exists():
        state = torch.load(directory / "checkpoint")
        model.load_state_dict(state["model"])
        step = state["step"]
    say(f"begin rank={rank} world={world} step={step} pid={os.getpid()}")
    stop = torch.zeros(1)
    while not stop.item():
        model(torch.randn(2, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if rank == 0:
            torch.save({"model": model.state_dict(), "step": step}, directory / "new")
            os.replace(directory / "new", directory / "checkpoint")
            stop.fill_((directory / "stop").exists())
            say(f"step {step} world={world}")
        dist.broadcast(stop, 0)
        time.sleep(pause)
    dist.destroy_process_group()
    time.sleep(rank)
    say(f"end rank={rank} world={world} step={step}")


def say(line: str) -> None:
    os.write(1, f"worker: {line}\n".encode())


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]))

"""A script of Accelerate for torchrun, with checkpoints of ours: accelerate_ddp.py STORE STEPS SECONDS_PER_STEP."""

from __future__ import annotations

import os
import sys
import time

import torch
from accelerate import Accelerator

from elastic3d.integrations.accelerate import AcceleratorCheckpoints


class Curriculum:
    """An object of the script's own."""

    def __init__(self) -> None:
        self.seen = 0

    def state_dict(self) -> dict[str, int]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


def say(line: str) -> None:
    os.write(1, f"worker: {line}\n".encode())


def main(store: str, steps: int, pause: float) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    accelerator, curriculum = Accelerator(cpu=True), Curriculum()
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    accelerator.register_for_checkpointing(curriculum)
    checkpoints = AcceleratorCheckpoints(accelerator, store)
    first = checkpoints.restore()
    assert curriculum.seen == first
    rank, world = accelerator.process_index, accelerator.num_processes
    say(f"begin rank={rank} world={world} step={first} pid={os.getpid()}")
    for step in range(first, steps):
        time.sleep(pause)
        given = torch.full((2, 4), float(step) / 40)
        accelerator.backward(model(given).square().mean())
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        curriculum.seen = step + 1
        if step % 2:
            checkpoints.save(step + 1)
        if rank == 0:
            say(f"step {step + 1} world={world}")
    checkpoints.finish()
    weights = accelerator.unwrap_model(model).state_dict()
    say(f"end step={steps} {weights['0.weight'].double().sum().item()!r}")
    accelerator.end_training()
    return dict(weights)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))

"""The demo's model, trained on a device as P7 asks for it, with a line in a file for each part of a trainer's start."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import elastic3d
from chaos.gpu import emulated_device, shared
from chaos.scripts.train_gpt import GPT, SourceFiles, arguments, cross_entropy, report
from elastic3d.clock import SYSTEM
from elastic3d.devices.cpu import CpuDevice
from elastic3d.devices.cuda import CudaDevice
from elastic3d.environment import DEVICE
from elastic3d.training import peers

MARKS = "CHAOS_GPU_MARKS"
"""Environment variable: the file the lines go to."""


def mark(part: str, **detail: Any) -> None:
    """Note that a part of this trainer's start is over."""
    line = json.dumps({"part": part, "pid": os.getpid(), "at": SYSTEM.wall(), **detail}) + "\n"
    descriptor = os.open(os.environ[MARKS], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, line.encode())
    finally:
        os.close(descriptor)


def marked(owner: Any, name: str, part: str) -> None:
    """Have a function note its end. One that is not there any more is no part."""
    function: Callable[..., Any] | None = getattr(owner, name, None)
    if function is None:
        return

    def run(*given: Any, **named: Any) -> Any:
        result = function(*given, **named)
        mark(part)
        return result

    setattr(owner, name, run)


def main(run: elastic3d.Run) -> None:
    """Train; entered once per generation."""
    mark("entered")
    if DEVICE.read() == shared.KIND:
        shared.stage_messages()
    options = arguments()
    model = run.shard(
        lambda: GPT(width=options.width, blocks=options.blocks, context=options.context),
        blocks="blocks",
        precision="bf16",
        reduction=options.reduction,
    )
    mark("built")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, foreach=True)
    data = SourceFiles(options.context)
    batches = run.batches(data, global_batch=options.global_batch, micro_batch=options.micro_batch, seed=options.seed)
    run.restore(model=model, optimizer=optimizer, batches=batches)
    mark("loaded")
    first = True
    for batch in batches.until(step=options.steps):
        SYSTEM.sleep(options.pause)
        loss = run.backward(model, batch, cross_entropy)
        run.step(optimizer, loss=loss, clip=1.0)
        if first:
            mark("stepped", step=run.steps)
            first = False
    report(run, options.out)


if __name__ == "__main__":
    emulated_device.install()
    shared.install()
    for kind in (CudaDevice, CpuDevice, emulated_device.EmulatedDevice):
        marked(kind, "open", "opened")
    marked(peers, "await_memory", "memory back")
    marked(dist, "init_process_group", "groups")
    options = arguments()
    elastic3d.run(
        main,
        store=options.store if options.checkpoint_every else None,
        layout=options.layout,
        events=options.events,
        snapshot_every=options.snapshot_every,
        every=options.checkpoint_every,
    )

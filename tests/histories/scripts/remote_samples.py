"""Train the demo's model on its own text, whose windows are parts of objects in an object store."""

from __future__ import annotations

import os
import time

import torch
from torch import Tensor

import elastic3d
from chaos.scripts.train_gpt import GPT, SourceFiles, arguments, cross_entropy, report, start
from checkpointing import open_store

DATA = "ELASTIC3D_TEST_DATA"
"""The prefix of the objects."""
AHEAD, WORKERS = "ELASTIC3D_TEST_AHEAD", "ELASTIC3D_TEST_WORKERS"
TOGETHER = 1000
"""Samples of one object; the last byte of each sample is the first one of the next."""


def put(url: str, data: SourceFiles) -> None:
    """Write the objects."""
    store, text = open_store(url), data.text.numpy().tobytes()
    for first in range(0, len(data), TOGETHER):
        store.put(object_of(first), text[first * data.context : (first + TOGETHER) * data.context + 1])


def object_of(number: int) -> str:
    """Return the name of the object that has a sample."""
    return f"parts/{number // TOGETHER:03d}.txt"


def parts(data: SourceFiles) -> list[tuple[str, int, int]]:
    """Return where each sample is."""
    starts = [number % TOGETHER * data.context for number in range(len(data))]
    return [(object_of(number), start, start + data.context + 1) for number, start in enumerate(starts)]


def window(data: bytes) -> tuple[Tensor, Tensor]:
    """Return the sample that `SourceFiles` makes of the same bytes."""
    text = torch.frombuffer(bytearray(data), dtype=torch.uint8).long()
    return text[:-1], text[1:]


def main(run: elastic3d.Run) -> None:
    """Train; entered once per generation."""
    options = arguments()
    model = run.shard(lambda: GPT(width=options.width, blocks=options.blocks, context=options.context), blocks="blocks")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=options.steps)
    data = elastic3d.Remote(
        os.environ[DATA], parts(SourceFiles(options.context)), make=window, ahead=int(os.environ[AHEAD])
    )
    batches = run.batches(
        data,
        global_batch=options.global_batch,
        micro_batch=options.micro_batch,
        seed=options.seed,
        workers=int(os.environ[WORKERS]),
    )
    run.restore(model=model, optimizer=optimizer, schedule=schedule, batches=batches)
    for batch in batches.until(step=options.steps):
        time.sleep(options.pause)
        run.step(optimizer, schedule, loss=run.backward(model, batch, cross_entropy), clip=1.0)
    report(run, options.out)


if __name__ == "__main__":
    start(main, arguments())

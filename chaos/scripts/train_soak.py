"""Train a very small GPT until somebody says at which step to stop: a job of short steps, for as long as it is wanted.

The file of `--end` holds the step. Whoever writes it chooses one that no rank can have reached before all have read it.
Where the last step is known from the start, as when such a job is played again, `--steps` says it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

import elastic3d
from chaos.scripts import train_gpt
from chaos.scripts.train_gpt import GPT, SourceFiles, cross_entropy, report
from elastic3d.clock import SYSTEM

FOREVER = 1_000_000_000
"""Steps that nobody waits for."""


def main(run: elastic3d.Run) -> None:
    """Train; entered once per generation."""
    own, options = arguments()
    model = run.shard(lambda: GPT(width=options.width, blocks=options.blocks, context=options.context), blocks="blocks")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    data = SourceFiles(options.context)
    batches = run.batches(data, global_batch=options.global_batch, micro_batch=options.micro_batch, seed=options.seed)
    run.restore(model=model, optimizer=optimizer, batches=batches)
    for batch in batches.until(step=options.steps or FOREVER):
        # Looked at before the step: what was restored may be the end already.
        if own.end is not None and batch.step >= end_of(own.end):
            break
        loss = run.backward(model, batch, cross_entropy)
        run.step(optimizer, loss=loss, clip=1.0)
        SYSTEM.sleep(own.pace)
    report(run, options.out)


def end_of(path: Path) -> int:
    """Return the step that a file says is the last one; FOREVER while there is none."""
    try:
        return int(path.read_text())
    except FileNotFoundError:
        return FOREVER


def arguments() -> tuple[argparse.Namespace, argparse.Namespace]:
    """Return our own options and those of `train_gpt`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--end", type=Path, help="file that will hold the last step")
    parser.add_argument("--pace", type=float, default=0.0, help="seconds between two steps")
    own, others = parser.parse_known_args()
    return own, train_gpt.arguments(others)


def start() -> None:
    """Train as the command line says, and keep three checkpoints."""
    options = arguments()[1]
    elastic3d.run(
        main,
        store=options.store,
        events=options.events,
        every="10s",
        # Nobody reads the store meanwhile: what is not needed goes soon, so that growth of the rest can be seen.
        checkpointing=elastic3d.Checkpointing(keep=3, grace="60s"),
    )


if __name__ == "__main__":
    start()

"""Train a byte-level GPT on the Python standard library's own source files.

The model and the data set know nothing of elastic3d; `main` is what a user writes.
"""

from __future__ import annotations

import argparse
import json
import os
import sysconfig
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import elastic3d


class Embedding(nn.Module):
    """Bytes and their places."""

    def __init__(self, width: int, context: int) -> None:
        super().__init__()
        self.byte = nn.Embedding(256, width)
        self.place = nn.Embedding(context, width)

    def forward(self, text: Tensor) -> Tensor:
        return self.byte(text) + self.place(torch.arange(text.shape[1], device=text.device))


class Block(nn.Module):
    """Attention and a feed-forward part, each added to the stream."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        shape = (batch, length, self.heads, width // self.heads)
        q, k, v = (part.view(shape).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).reshape(batch, length, width)))
        return x + self.dropout(self.down(functional.gelu(self.up(self.norm2(x)))))


class GPT(nn.Module):
    """A plain decoder: one chain from bytes to logits."""

    def __init__(self, *, width: int, blocks: int, context: int, heads: int = 4, dropout: float = 0.1) -> None:
        super().__init__()
        self.embedding = Embedding(width, context)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)

    def forward(self, text: Tensor) -> Tensor:
        x = self.embedding(text)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class SourceFiles(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Windows of the standard library's sources: `context` bytes, and the same one byte on."""

    def __init__(self, context: int, limit: int = 4_000_000) -> None:
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        text = b"".join(file.read_bytes() for file in files)[:limit]
        self.text, self.context = torch.frombuffer(bytearray(text), dtype=torch.uint8), context
        self.sample_tokens = context

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        window = self.text[index * self.context : (index + 1) * self.context + 1].long()
        return window[:-1], window[1:]


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """Return the mean loss over all bytes of a micro-batch."""
    return functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def main(run: elastic3d.Run) -> None:
    """Train; entered once per generation."""
    options = arguments()
    model = run.shard(
        lambda: GPT(width=options.width, blocks=options.blocks, context=options.context),
        blocks="blocks",
        reduction=options.reduction,
        leaf=options.leaf,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=options.steps)
    data = SourceFiles(options.context)
    batches = run.batches(
        data,
        global_batch=options.global_batch,
        micro_batch=options.micro_batch,
        seed=options.seed,
        workers=options.workers,
    )
    run.restore(model=model, optimizer=optimizer, schedule=schedule, batches=batches)
    for batch in batches.until(step=options.steps):
        time.sleep(options.pause)
        loss = run.backward(model, batch, cross_entropy)
        run.step(optimizer, schedule, loss=loss, clip=1.0)
    report(run, options.out)


def report(run: elastic3d.Run, out: Path | None) -> None:
    """Write the digest of all parameters and optimizer state, the same whatever the layout was."""
    digest = run.digest()
    if out is not None and run.rank == 0:
        unfinished = out / "result.json.part"
        unfinished.write_text(json.dumps({"digest": digest}) + "\n")
        os.replace(unfinished, out / "result.json")


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line, or of `given` in its place."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_sizes(parser)
    parser.add_argument("--reduction", choices=("ordered", "fast"), default="ordered")
    parser.add_argument("--leaf", type=int, default=1, help="micro-batches that are added up where they are run")
    parser.add_argument("--snapshot-every", type=int, default=1, help="steps between snapshots in memory; 0 for none")
    parser.add_argument(
        "--checkpoint-every", type=every, default=10, help="steps between checkpoints, 0 for none; 30s; continuous"
    )
    parser.add_argument("--keep", type=int, default=None, help="how many checkpoints to keep; default: all")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds before each step, as if a device computed")
    parser.add_argument("--workers", type=int, default=0, help="processes of each rank that load its samples")
    parser.add_argument("--layout", type=elastic3d.Layout.parse, default=None, help="such as pp=2; the rest is planned")
    parser.add_argument("--calibration", default=None, help="file of elastic3d calibrate, to plan layouts by")
    parser.add_argument("--store", default=None, help="where checkpoints go: any fsspec URL")
    parser.add_argument("--events", default=None, help="folder for event files")
    parser.add_argument("--tracker", action="append", default=[], help="where curves go, such as csv:losses.csv")
    parser.add_argument("--metrics", default=None, help="where each node serves its metrics, such as :9464 or :0")
    parser.add_argument("--telemetry", default=None, help="where each node sends telemetry: otlp, or an address")
    parser.add_argument("--out", type=Path, default=None, help="folder for the result")
    return parser.parse_args(given)


def add_sizes(parser: argparse.ArgumentParser) -> None:
    """Add the sizes of the model and of its steps, which other tools' scripts are given too."""
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=17)
    parser.add_argument("--global-batch", type=int, default=8)
    parser.add_argument("--micro-batch", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--width", type=int, default=208)
    parser.add_argument("--context", type=int, default=64)


def every(text: str) -> int | str:
    """Return a number of steps, or another form that `elastic3d.run(every=...)` takes."""
    return int(text) if text.isdecimal() else text


def start(main: Callable[[elastic3d.Run], None], options: argparse.Namespace, **more: Any) -> None:
    """Train with `main` as the options say. more: as `elastic3d.run` takes it."""
    elastic3d.run(
        main,
        store=options.store,
        layout=options.layout,
        calibration=options.calibration,
        events=options.events,
        trackers=options.tracker,
        metrics=options.metrics,
        telemetry=options.telemetry,
        snapshot_every=options.snapshot_every,
        every=options.checkpoint_every,
        checkpointing=elastic3d.Checkpointing(keep=options.keep),
        **more,
    )


if __name__ == "__main__":
    start(main, arguments())

"""Begin a run with weights that exist, and write down what each rank read: begin_with_weights.py FOLDER WIDTH DEPTH OUT
LAYOUT, for `chaos.bench.weights`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

import elastic3d
from chaos.bench.gpt import GPT, Sentences
from elastic3d.clock import SYSTEM


def counted() -> dict[str, int]:
    """Return what this process has read: bytes that it asked for, and bytes that came from disks for it."""
    lines = Path("/proc/self/io").read_text().splitlines()
    counts = {name: int(value) for name, _, value in (line.partition(": ") for line in lines)}
    return {"asked": counts["rchar"], "fetched": counts["read_bytes"]}


def main(run: elastic3d.Run) -> None:
    """Read the weights."""
    weights, width, depth, out = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    before, began = counted(), SYSTEM.monotonic()
    model = run.shard(lambda: GPT(width=width, depth=depth), blocks="blocks", weights=weights)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    batches = run.batches(Sentences(), global_batch=8, micro_batch=2, seed=11)
    run.restore(model=model, optimizer=optimizer, batches=batches)
    seconds = SYSTEM.monotonic() - began
    read = {name: value - before[name] for name, value in counted().items()}
    status = Path("/proc/self/status").read_text()
    peak = 1024 * int(status.partition("VmHWM:")[2].split()[0])
    written = out / f"{run.rank}.part"
    written.write_text(json.dumps({"seconds": seconds, "peak": peak, **read}))
    os.replace(written, out / f"{run.rank}.json")


if __name__ == "__main__":
    elastic3d.run(main, layout=elastic3d.Layout.parse(sys.argv[5]), snapshot_every=0, health="off")

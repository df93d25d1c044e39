"""Train the demo's model with a promise broken on purpose: the environment's PLANTED says which.

Each waits for something that schedules bring about, and then does what the promise excludes: the script itself where it
begins again after step 0, the node's keeper as it writes down what happens.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

import elastic3d
from chaos.scripts.train_gpt import GPT, SourceFiles, arguments, cross_entropy, report, start
from elastic3d.data.batches import Batches
from elastic3d.log import Level
from elastic3d.worker.journal import Journal

PLANTED = os.environ.get("PLANTED", "")
LONG = 1_000.0
"""Seconds that are longer than anybody waits."""

Fields = Mapping[str, Any]
emit_at = Journal.emit_at


def main(run: elastic3d.Run) -> None:
    """Train as the demo does, but for what is planted."""
    options = arguments()
    model = run.shard(lambda: GPT(width=options.width, blocks=options.blocks, context=options.context), blocks="blocks")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    data = SourceFiles(options.context)
    batches = run.batches(data, global_batch=options.global_batch, micro_batch=options.micro_batch, seed=options.seed)
    run.restore(model=model, optimizer=optimizer, batches=batches)
    goal = options.steps
    if batches.step and PLANTED in AGAIN:
        goal = AGAIN[PLANTED](batches, optimizer, goal)
    for batch in batches.until(step=goal):
        time.sleep(options.pause)
        loss = run.backward(model, batch, cross_entropy)
        run.step(optimizer, loss=loss, clip=1.0)
    report(run, options.out)


def noise(batches: Batches, optimizer: torch.optim.Optimizer, goal: int) -> int:
    """Restore a state that is almost the right one."""
    with torch.no_grad():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.mul_(1 + 1e-3)
    return goal


def early(batches: Batches, optimizer: torch.optim.Optimizer, goal: int) -> int:
    """Lose the last step."""
    return goal - 1


def raises(batches: Batches, optimizer: torch.optim.Optimizer, goal: int) -> int:
    """Fail where nothing but the nodes is another one."""
    raise RuntimeError("planted")


def alarm(journal: Journal, name: str, fields: Fields) -> None:
    """Blame somebody for an etcd that was away."""
    if name == "etcd.back":
        about = {"fault": "stopped", "ranks": [0], "nodes": ["another"], "step": 1, "act": True}
        emit_at(journal, None, "rank.stuck", **about, confidence=1.0, detail="planted", waits=[])


def left(journal: Journal, name: str, fields: Fields) -> None:
    """Leave a file behind when etcd was away."""
    if name == "etcd.back":
        Path(tempfile.gettempdir(), "planted").touch()


def damage(journal: Journal, name: str, fields: Fields) -> None:
    """Spoil what was just saved, once the nodes have changed."""
    if name == "checkpoint.committed" and _changed:
        packs = [path for path in (_folders[0].parent / "store" / "packs").rglob("*") if path.is_file()]
        newest = max(packs, key=lambda path: path.stat().st_mtime)
        content = bytearray(newest.read_bytes())
        content[len(content) // 2] ^= 1
        newest.write_bytes(content)


def stands(journal: Journal, name: str, fields: Fields) -> None:
    """Stand still once the nodes have changed."""
    if _changed:
        time.sleep(LONG)


def exits(journal: Journal, name: str, fields: Fields) -> None:
    """End badly when the node was let go."""
    if name == "job.ended" and fields["error"]:
        os._exit(3)


AGAIN: Mapping[str, Callable[[Batches, torch.optim.Optimizer, int], int]] = {
    one.__name__: one for one in (noise, early, raises)
}
HEARD: Mapping[str, Callable[[Journal, str, Fields], None]] = {
    one.__name__: one for one in (alarm, left, damage, stands, exits)
}
_changed: list[int] = []
_folders: list[Path] = []
begin = Journal.__init__


def opened(journal: Journal, folder: str | None, *rest: Any, **more: Any) -> None:
    """Begin to write events, into a folder beside the job's store."""
    begin(journal, folder, *rest, **more)
    _folders.append(Path(folder or ""))


def hear(journal: Journal, level: Level | None, name: str, **fields: Any) -> None:
    """Write an event, and do what is planted."""
    emit_at(journal, level, name, **fields)
    if name == "generation.sealed" and fields["number"] > 1:
        _changed.append(fields["number"])
    HEARD[PLANTED](journal, name, fields)


if PLANTED in HEARD:
    Journal.__init__ = opened  # type: ignore[assignment, method-assign]
    Journal.emit_at = hear  # type: ignore[assignment, method-assign]

if __name__ == "__main__":
    start(main, arguments())

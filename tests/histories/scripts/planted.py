"""Train the demo's model with a promise broken on purpose: the environment's PLANTED says which.

Each waits for something that schedules bring about, and then does what the promise excludes: the script itself where it
begins again after step 0, the node's keeper as it writes down what happens, or either of them by code of the runtime
that is another one from the beginning.
"""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import elastic3d
from chaos.scripts.train_gpt import GPT, SourceFiles, arguments, cross_entropy, report, start
from checkpointing.format.tiles import TensorSpec
from elastic3d.data.batches import Batches
from elastic3d.data.positions import Order
from elastic3d.log import Level
from elastic3d.membership.records import SavedStep
from elastic3d.training import Run, restoring
from elastic3d.training.restoring import Known, PeerInventory
from elastic3d.worker.checkpoints.node_checkpoints import Checkpoints
from elastic3d.worker.checkpoints.uploader import TilesUploaded, WriteFailed
from elastic3d.worker.journal import Journal
from elastic3d.worker.processes import events as w

PLANTED = os.environ.get("PLANTED", "")
LONG = 1_000.0
"""Seconds that are longer than anybody waits."""
DAWDLING = 20.0
"""Seconds that are longer than a recovery was asked to take."""
LATER = 7
"""A step after which there is a checkpoint of an earlier one."""
LATE = 2.0
"""Seconds by which a commit is too late that somebody else makes at once."""

Fields = Mapping[str, Any]
Told = w.Started | w.Restored | w.StepFinished | w.AuditHeard | w.TrainerExited
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


def replace(owner: object, name: str, by: Callable[..., Any]) -> None:
    """Have the runtime call another function."""
    setattr(owner, name, by)


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


def dawdles(batches: Batches, optimizer: torch.optim.Optimizer, goal: int) -> int:
    """Take longer to go on than anybody asked for."""
    time.sleep(DAWDLING)
    return goal


def ends(batches: Batches, optimizer: torch.optim.Optimizer, goal: int) -> int:
    """Make no more steps, so that nothing comes of what is to happen in them."""
    return batches.step


def skips(batches: Batches, optimizer: torch.optim.Optimizer, goal: int) -> int:
    """Pass over the samples of a step."""
    positions, size = Order.positions, batches.global_batch

    def later(order: Order, first: int, stop: int | None = None) -> tuple[int, int]:
        begin, end = positions(order, first, stop)
        return begin + size, end + size

    replace(Order, "positions", later)
    return goal


def unsaved(batches: Batches, optimizer: torch.optim.Optimizer, goal: int) -> int:
    """Save nothing at the end."""

    finish = Run.finish

    def finished(run: Run) -> int:
        run._stored_step = run.steps
        return finish(run)

    replace(Run, "finish", finished)
    return goal


def alarm(journal: Journal, name: str, fields: Fields) -> None:
    """Blame somebody for an etcd that was away."""
    if name == "etcd.back":
        about = {"fault": "stopped", "ranks": [0], "nodes": ["another"], "step": 1, "act": True}
        emit_at(journal, None, "rank.stuck", **about, confidence=1.0, detail="planted", waits=[])


def buries(journal: Journal, name: str, fields: Fields) -> None:
    """Take somebody for dead when etcd was away."""
    if name == "etcd.back":
        emit_at(journal, None, "peer.lost", peer="another", evidence="planted")


def crashes(journal: Journal, name: str, fields: Fields) -> None:
    """End the trainer when etcd was away."""
    if name == "etcd.back" and _trainers:
        os.kill(_trainers.pop(), signal.SIGKILL)


def started(journal: Journal, event: Told, generation: int, rank: int) -> None:
    """Write what a trainer did, and remember it."""
    trainer(journal, event, generation, rank)
    if isinstance(event, w.Started):
        _trainers.append(event.pid)


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


def repeats() -> None:
    """Leave at a step's boundary without a snapshot of that step."""
    keep = Run._keep_step

    def keep_step(run: Run) -> bool:
        leaves = run._ending is not None and run._ending.leave
        if leaves:
            run._ending = None
        return leaves or keep(run)

    replace(Run, "_keep_step", keep_step)


def unheard() -> None:
    """Keep it from everybody who reads events that a peer was lost, or has to leave."""

    def emit(journal: Journal, level: Level | None, name: str, **fields: Any) -> None:
        if name not in ("peer.lost", "node.draining"):
            emit_at(journal, level, name, **fields)

    replace(Journal, "emit_at", emit)


def mute() -> None:
    """Keep it from everybody why the job ends."""

    def emit(journal: Journal, level: Level | None, name: str, **fields: Any) -> None:
        more = {"error": "planted"} if name == "job.ended" and fields["error"] else {}
        emit_at(journal, level, name, **{**fields, **more})

    replace(Journal, "emit_at", emit)


def forgets() -> None:
    """Go on from a checkpoint, of which there is one by then, whatever is in memory."""
    choose = restoring.choose

    def chosen(inventories: Sequence[PeerInventory], specs: Iterable[TensorSpec], known: Known) -> object:
        return None if known.newest > LATER else choose(inventories, specs, known)

    replace(restoring, "choose", chosen)


def usurps() -> None:
    """Have nodes that do not lead commit the saves of odd steps, once the nodes have changed; who leads comes later."""
    heard, commit = Checkpoints.heard, Checkpoints.commit

    def also(checkpoints: Checkpoints, event: TilesUploaded | WriteFailed) -> SavedStep | None:
        saved = heard(checkpoints, event)
        if saved is not None and _changed and not checkpoints._leads and saved.step % 2:
            commit(checkpoints, saved, saved.made_in)
        return saved

    def late(checkpoints: Checkpoints, saved: SavedStep, number: int) -> None:
        if _changed and saved.step % 2:
            threading.Timer(LATE, commit, (checkpoints, saved, number)).start()
        else:
            commit(checkpoints, saved, number)

    replace(Checkpoints, "heard", also)
    replace(Checkpoints, "commit", late)


AGAIN: Mapping[str, Callable[[Batches, torch.optim.Optimizer, int], int]] = {
    one.__name__: one for one in (noise, early, ends, raises, skips, unsaved, dawdles)
}
HEARD: Mapping[str, Callable[[Journal, str, Fields], None]] = {
    one.__name__: one for one in (alarm, buries, crashes, left, damage, stands, exits)
}
OTHERWISE: Mapping[str, Callable[[], None]] = {one.__name__: one for one in (repeats, unheard, mute, forgets, usurps)}
_changed: list[int] = []
_trainers: list[int] = []
_folders: list[Path] = []
begin, trainer = Journal.__init__, Journal.trainer


def opened(journal: Journal, folder: str | None, *rest: Any, **more: Any) -> None:
    """Begin to write events, into a folder beside the job's store."""
    begin(journal, folder, *rest, **more)
    _folders.append(Path(folder or ""))


def hear(journal: Journal, level: Level | None, name: str, **fields: Any) -> None:
    """Write an event, and do what is planted."""
    emit_at(journal, level, name, **fields)
    if name == "generation.sealed" and fields["number"] > 1:
        _changed.append(fields["number"])
    if PLANTED in HEARD:
        HEARD[PLANTED](journal, name, fields)


if PLANTED in (*HEARD, *OTHERWISE):
    replace(Journal, "__init__", opened)
    replace(Journal, "emit_at", hear)
    replace(Journal, "trainer", started)
if PLANTED in OTHERWISE:
    OTHERWISE[PLANTED]()

if __name__ == "__main__":
    start(main, arguments())

"""Worlds of real ranks that train a small model, each rank forked anew, keep their state in files, and restore it."""

from __future__ import annotations

import json
import os
import signal
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.utils.data import Dataset

from chaos.gpu import shared
from chaos.gpu.forked import Child, ChildFailed, Talk
from chaos.scripts.train_gpt import GPT, cross_entropy
from checkpointing.format.tiles import Box, TensorSpec, digest
from checkpointing.reading.resolver import Offered, TileSource
from elastic3d.clock import SYSTEM
from elastic3d.devices import device_at
from elastic3d.distrust import Distrust
from elastic3d.parallel.initial import WHOLE_BELOW
from elastic3d.port import Go, LocalState, NearMemory, StateRestored
from elastic3d.snapshots.arena import Arena
from elastic3d.training import Run
from elastic3d.training.restoring import Decision
from elastic3d.training.standalone import StandalonePort
from elastic3d.values import Layout, StoreAt
from elastic3d.worker.processes.copying import Copier, prepare

_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What a world does. kind: of its device. keep: folder for its snapshots; take: the one it restores from.

    die_at: the step after whose snapshot all ranks are killed, 0 for none. large: build it as a model that no host
    holds whole. fused: with torch's fused AdamW.
    """

    layout: Layout
    kind: str
    width: int
    blocks: int
    context: int
    steps: int
    global_batch: int = 12
    precision: str = "bf16"
    recompute: str = "full"
    reduction: str = "ordered"
    keep: str = ""
    take: str = ""
    die_at: int = 0
    large: bool = False
    fused: bool = False

    def __str__(self) -> str:
        words = [str(self.layout), self.precision, f"recompute {self.recompute}"]
        words += ["large"] if self.large else []
        words += ["fused"] if self.fused else []
        words += [f"killed after step {self.die_at}"] if self.die_at else []
        words += ["restored"] if self.take else []
        return ", ".join(words)


class Bytes(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Sample i is a text made from i."""

    def __init__(self, context: int) -> None:
        self._context = context

    def __len__(self) -> int:
        return 1 << 12

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        text = torch.randint(0, 256, (self._context + 1,), generator=torch.Generator().manual_seed(index))
        return text[:-1], text[1:]


def run_world(task: Task, *, limit: float) -> list[dict[str, Any]]:
    """Run a world to its end; return what each rank says. ChildFailed where one failed, or time was up.

    Ranks that are to be killed say nothing.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    end = SYSTEM.monotonic() + limit
    ranks = [Child(_rank, task, rank, store.port) for rank in range(task.layout.world)]
    try:
        said = []
        for number, rank in enumerate(ranks):
            try:
                said.append(rank.answer(end - SYSTEM.monotonic()))
            except ChildFailed as error:
                if not (task.die_at and f"code {-signal.SIGKILL}" in str(error)):
                    raise ChildFailed(f"{task}: rank {number}: {error}") from None
        return said
    finally:
        for rank in ranks:
            rank.end()


def train(run: Run, task: Task) -> dict[str, Any]:
    """Train with dropout, clipping and a schedule; return the digest, the losses and the seconds of the steps."""
    model = run.shard(
        lambda: GPT(width=task.width, blocks=task.blocks, context=task.context),
        blocks="blocks",
        seed=3,
        precision=task.precision,
        recompute=task.recompute,
        reduction=task.reduction,
        whole_below=0 if task.large else WHOLE_BELOW,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=task.fused or None)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
    batches = run.batches(Bytes(task.context), global_batch=task.global_batch, micro_batch=2, seed=11)
    run.restore(model=model, optimizer=optimizer, schedule=schedule, batches=batches)
    for batch in batches.until(step=task.steps):
        loss = run.backward(model, batch, cross_entropy)
        run.step(optimizer, schedule, loss=loss, clip=0.5)
        if run.steps == task.die_at:
            _die(run)
    return {"digest": run.digest(), "steps": run.steps}


def _die(run: Run) -> None:
    run._port.finish_copy()
    if run.world > 1:
        dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def _rank(talk: Talk, task: Task, rank: int, port: int) -> dict[str, Any]:
    if task.kind != "cpu":
        shared.stage_messages(everything=task.kind != shared.KIND)
    host = Host(task, rank, port)
    run = Run(host, tiers=Files())
    result = train(run, task)
    return {**result, "losses": [record.loss.hex() for record in host.records], "restored": host.restored_from}


class Host(StandalonePort):
    """One rank's host: it copies snapshots as trainers do, and writes them to files."""

    def __init__(self, task: Task, rank: int, port: int) -> None:
        super().__init__()
        self.device = device_at(task.kind, 0)
        self.restored_from = ""
        self._task = task
        self._copier = Copier([Arena.create()], self.device)
        self._arena = self._copier._arenas[0]
        self.assignment = replace(
            self.assignment,
            generation=2 if task.take else 1,
            rank=rank,
            world=task.layout.world,
            layout=task.layout,
            store_host="127.0.0.1",
            store_port=port,
            store_prefix="world",
            snapshot_every=1 if task.keep else 0,
            device=task.kind,
        )

    def await_go(self) -> Go:
        """Begin from the files, where there are some."""
        return Go(servers=(self._task.take,) if self._task.take else ())

    def snapshot(self, state: LocalState, *, checkpoint: bool, wait: bool) -> None:
        """Copy the state beside the next step, then write it."""
        if not self._task.keep:
            return
        copy = prepare(state.tiles, None, self.device, acquire=lambda: 0, complete=lambda buffer, _: write(buffer))
        name = f"{state.step}.{self.assignment.generation}.{self.assignment.rank}"

        def write(buffer: int) -> None:
            entries = [
                {"key": e.spec.key, "dtype": e.spec.dtype, "shape": e.spec.shape, "start": e.box.start}
                | {"stop": e.box.stop, "offset": e.offset, "nbytes": e.nbytes}
                for e in copy.table.entries
            ]
            header = json.dumps({"facts": state.facts, "entries": entries}).encode()
            with Path(self._task.keep, name).open("wb") as file:
                file.write(_LENGTH.pack(len(header)) + header)
                file.write(self._arena.view(copy.table.nbytes))

        self._copier.start(copy)

    def finish_copy(self) -> None:
        """Wait until the state may be changed."""
        self._copier.finish()

    def restored(self, state: StateRestored) -> None:
        """Keep where it came from."""
        self.restored_from = f"{state.source} {state.step}"


class Kept:
    """A snapshot in a file, as an inventory."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.step, self.generation, _ = map(int, file.name.split("."))
        with file.open("rb") as opened:
            (length,) = _LENGTH.unpack(opened.read(_LENGTH.size))
            header = json.loads(opened.read(length))
        self._begin = _LENGTH.size + length
        self.facts: dict[str, Any] = header["facts"]
        self._entries = header["entries"]

    def offers(self) -> list[Offered]:
        """Return its tiles."""
        data = self._file.read_bytes()
        offered = []
        for entry in self._entries:
            spec = TensorSpec(key=entry["key"], dtype=entry["dtype"], shape=tuple(entry["shape"]))
            box = Box(start=tuple(entry["start"]), stop=tuple(entry["stop"]))
            at = self._begin + entry["offset"]
            piece = memoryview(data)[at : at + entry["nbytes"]]
            where = [str(self._file), at, entry["nbytes"]]
            offered.append(Offered(spec=spec, box=box, digest=digest(spec, box, piece), source=Files.name, where=where))
        return offered


class Files:
    """The tiers of a world: a folder of snapshots stands for the memory of keepers."""

    name = "files"

    def inventories(self, servers: Sequence[str]) -> Sequence[Kept]:
        """Return what is in the folders."""
        return [Kept(file) for server in servers for file in sorted(Path(server).iterdir())]

    def checkpoint(
        self, at: StoreAt, wanted: str, damaged: Sequence[str], distrusted: Sequence[Distrust] = ()
    ) -> Decision | None:
        """Return None: there is no store."""
        return None

    def sources(
        self, decision: Decision, at: StoreAt | None, rank: int, near: Sequence[NearMemory] = ()
    ) -> Mapping[str, TileSource]:
        """Return the one source."""
        return {self.name: self}

    def fetch(self, tile: Offered) -> bytes | memoryview:
        """Return a tile's bytes."""
        file, at, nbytes = tile.where
        with Path(file).open("rb") as opened:
            opened.seek(at)
            return opened.read(nbytes)

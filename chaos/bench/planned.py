"""Measured steps of one layout: ranks forked on this machine, a small GPT, gloo."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import time
import uuid
from dataclasses import dataclass, replace
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import PrefixStore, TCPStore

from chaos.scripts.train_gpt import GPT, SourceFiles, cross_entropy
from elastic3d.port import StepRecord
from elastic3d.training import Run
from elastic3d.training.standalone import StandalonePort
from elastic3d.values import Layout, ModelProfile, ProvenChain

STEPS = 3
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
PATIENCE = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """Sizes of the GPT that is trained."""

    width: int = 192
    blocks: int = 8
    context: int = 32
    micro_batch: int = 1
    micro_batches: int = 8

    def build(self) -> nn.Module:
        """Return it, without dropout."""
        return GPT(width=self.width, blocks=self.blocks, context=self.context, dropout=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What the ranks of a layout took in each step after the first.

    seconds: on the clock. worked: seconds of processor time of all ranks together, which other people's work on the
    machine does not add to. memory_bytes: of the fullest rank.
    """

    seconds: tuple[float, ...]
    worked: tuple[float, ...]
    memory_bytes: int


class _Host(StandalonePort):
    """The port of one rank."""

    def __init__(self, layout: Layout, rank: int, port: int, prefix: str) -> None:
        super().__init__()
        self.assignment = replace(
            self.assignment,
            rank=rank,
            world=layout.world,
            layout=layout,
            store_host="127.0.0.1",
            store_port=port,
            store_prefix=prefix,
        )
        self.worked: list[float] = []

    def committed(self, record: StepRecord) -> None:
        """Keep the record, and the processor time up to it."""
        super().committed(record)
        self.worked.append(time.process_time())


class _Measuring(StandalonePort):
    """The port of a trainer that only measures its model."""

    def __init__(self) -> None:
        super().__init__()
        self.assignment = replace(self.assignment, measuring=True)
        self.profile: ModelProfile | None = None

    def measured(self, profile: ModelProfile, proven: ProvenChain | None = None) -> NoReturn:
        """Keep the profile and end the trainer."""
        self.profile = profile
        raise StopIteration


def profile_of(model: Model) -> ModelProfile:
    """Return the profile that a run of the model would be planned from."""
    port = _Measuring()
    try:
        _train(Run(port), model)
    except StopIteration:
        pass
    assert port.profile is not None
    return port.profile


def run_layout(layout: Layout, model: Model, *, exact: bool = False) -> Measured:
    """Train a few steps under a layout; exact: for the sake of memory, which costs time."""
    results = in_world(layout.world, _train_rank, layout, model, exact)
    times = zip(*(seconds for seconds, _, _ in results), strict=True)
    works = zip(*([b - a for a, b in pairwise(worked)] for _, worked, _ in results), strict=True)
    return Measured(
        seconds=tuple(max(step) for step in list(times)[1:]),
        worked=tuple(sum(step) for step in works),
        memory_bytes=max(nbytes for _, _, nbytes in results),
    )


def in_world(world: int, target: Any, *args: Any) -> list[Any]:
    """Return what `target(*args, rank, port, prefix)` returns on each rank of a world of processes."""
    os.environ["OMP_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["chaos.bench.planned", "torch.distributed.fsdp", "torch.distributed.pipelining"])
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    prefix = uuid.uuid4().hex
    ends = [context.Pipe(duplex=False) for _ in range(world)]
    ranks = [
        context.Process(target=_tell, args=(ends[rank][1], target, *args, rank, store.port, prefix), daemon=True)
        for rank in range(world)
    ]
    for rank in ranks:
        rank.start()
    try:
        for receiver, _ in ends:
            if not receiver.poll(PATIENCE):
                raise TimeoutError(f"a rank of {world} said nothing for {PATIENCE:.0f} s")
        return [receiver.recv() for receiver, _ in ends]
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()


def _tell(sender: Connection, target: Any, *args: Any) -> None:
    torch.set_num_threads(1)
    sender.send(target(*args))
    os._exit(0)


def _train_rank(
    layout: Layout, model: Model, exact: bool, rank: int, port: int, prefix: str
) -> tuple[list[float], list[float], int]:
    if exact:
        # What is freed goes back to the kernel at once; else the peak is that of the allocator, not of the tensors.
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_THRESHOLD, 1 << 15)
        libc.mallopt(M_TRIM_THRESHOLD, 1 << 15)
    host = _Host(layout, rank, port, prefix)
    data = SourceFiles(model.context)
    # From here on the kernel counts the most memory anew.
    Path("/proc/self/clear_refs").write_text("5")
    before = _memory("VmRSS")
    _train(Run(host), model, data)
    return [record.seconds for record in host.records], host.worked, _memory("VmHWM") - before


def _train(run: Run, model: Model, data: SourceFiles | None = None) -> None:
    made = run.shard(model.build, blocks="blocks")
    optimizer = torch.optim.AdamW(made.parameters(), lr=1e-4)
    batches = run.batches(
        data or SourceFiles(model.context),
        global_batch=model.micro_batch * model.micro_batches,
        micro_batch=model.micro_batch,
    )
    run.restore(model=made, optimizer=optimizer, batches=batches)
    for batch in batches.until(step=STEPS):
        loss = run.backward(made, batch, cross_entropy)
        run.step(optimizer, loss=loss)


def _memory(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"the kernel says nothing of {name}")


def talk(nbytes: int, rank: int, port: int, prefix: str) -> tuple[float, float]:
    """Return the seconds of exchanging nothing much, and of `nbytes` with each of the others, for one collective."""
    store = PrefixStore(prefix, TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    fastest = []
    for size in (16, nbytes):
        sent, received = torch.zeros(2 * size, dtype=torch.uint8), torch.zeros(2 * size, dtype=torch.uint8)
        times = []
        for _ in range(12):
            began = time.perf_counter()
            dist.all_to_all_single(received, sent)
            times.append(time.perf_counter() - began)
        fastest.append(min(times))
    return fastest[0], fastest[1]

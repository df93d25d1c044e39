"""P4: how fast a state goes into shared memory and back, what training beside it loses, and whether it is whole."""

from __future__ import annotations

import os
import statistics
import threading
from collections.abc import Callable, Sequence
from functools import partial

import blake3
import torch

from chaos.gpu import rings
from chaos.gpu.bench import GB, Bench
from checkpointing.format.tiles import Box, TensorSpec
from elastic3d.clock import SYSTEM
from elastic3d.devices import ComputeDevice, Move
from elastic3d.snapshots.arena import Arena
from elastic3d.worker.processes.copying import Copier, Copy, prepare

NBYTES, TENSORS = 10 * 10**9, 1200
ALIGNMENT = 64


def measure(bench: Bench) -> None:
    """Say what trainers do first, then the other ways."""
    device = bench.opened()
    moves, nbytes = _state(bench, device)
    arena = Arena.create()
    arena.reserve(nbytes)
    view = arena.view(nbytes)
    with bench.attempting("snapshot_copy"):
        _as_trainers_do(bench, device, moves, view)
    with bench.attempting("snapshot_slowdown"):
        _beside(bench, device, moves, view)
    with bench.attempting("late_work"):
        _late_work(bench, device)
    with bench.attempting("copy_back", way="pageable"):
        target = rings.tensor_over(view)
        _speed(bench, "copy_back", nbytes, lambda: rings.copy_back(moves, target, queued=False), way="pageable")
    for threads in (1, 2, 4):
        with bench.attempting("ring", threads=threads):
            ring = rings.Ring(device.torch_device, threads=threads, nbytes=1 << 16 if bench.small else rings.BUFFER)
            _speed(bench, "ring", nbytes, partial(ring.to_host, moves, view), threads=threads)
            _speed(bench, "copy_back", nbytes, partial(ring.to_device, moves, view), way=f"ring, {threads}")
    with bench.attempting("pageable"):
        _pageable(bench, moves, nbytes)
    if bench.cuda:
        with bench.attempting("registered"):
            _registered(bench, moves, nbytes, rings.tensor_over(view))
    _digests(bench, view)


def _pageable(bench: Bench, moves: Sequence[Move], nbytes: int) -> None:
    """Copy tensor by tensor into memory that is not pinned, which no page was touched of at first."""
    arena = Arena.create()
    arena.reserve(nbytes)
    target = rings.tensor_over(arena.view(nbytes))
    for memory in ("cold", "warm"):
        _once(bench, "pageable", nbytes, partial(rings.copy_pageable, moves, target), memory=memory)
    arena.close()


def _state(bench: Bench, device: ComputeDevice) -> tuple[list[Move], int]:
    """Return tensors of three sizes, as a state's are, and the bytes of a target for them."""
    number, whole = (24, 24 << 16) if bench.small else (TENSORS, NBYTES)
    moves, offset = [], 0
    for index in range(number):
        count = int(whole / number * (0.5, 1.0, 1.5)[index % 3]) // 4
        tensor = torch.full((count,), float(index), device=device.torch_device)
        moves.append(Move(tensor=tensor, offset=offset))
        offset += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    bench.sync()
    return moves, offset


def _once(bench: Bench, figure: str, nbytes: int, work: Callable[[], object], **detail: str | int) -> None:
    bench.sync()
    began = SYSTEM.monotonic()
    work()
    bench.sync()
    bench.say(figure, nbytes / GB / (SYSTEM.monotonic() - began), "GB/s", **detail)


def _speed(bench: Bench, figure: str, nbytes: int, work: Callable[[], object], **detail: str | int) -> None:
    bench.say(figure, nbytes / GB / bench.seconds(work, repeats=3), "GB/s", **detail)


def _as_trainers_do(bench: Bench, device: ComputeDevice, moves: Sequence[Move], view: memoryview) -> None:
    stream = device.copy_stream()
    nbytes = len(view)
    _once(bench, "snapshot_copy_cold", nbytes, lambda: stream.copy(moves, view, device.mark()))
    _speed(bench, "snapshot_copy", nbytes, lambda: stream.copy(moves, view, device.mark()))
    last = moves[-1]
    copied = rings.tensor_over(view)[last.offset : last.offset + last.tensor.nbytes].view(torch.float32)
    bench.say("snapshot_whole", bool((copied == float(len(moves) - 1)).all()))


def _beside(bench: Bench, device: ComputeDevice, moves: Sequence[Move], view: memoryview) -> None:
    """Compare the rate of products alone and while a thread copies one snapshot after the other, by turns."""
    size, at_once = (128, 4) if bench.small else (8192, 8)
    number = torch.bfloat16 if bench.cuda else torch.float32
    matrix = torch.ones(size, size, device=device.torch_device, dtype=number) / size
    stop, copies = threading.Event(), [0]

    def copy() -> None:
        device.enter_thread()
        stream = device.copy_stream()
        while not stop.is_set():
            stream.copy(moves, view, device.mark())
            copies[0] += 1

    def products(seconds: float) -> float:
        """Return the seconds of one batch of products."""
        times = []
        end = SYSTEM.monotonic() + seconds
        while SYSTEM.monotonic() < end:
            began = SYSTEM.monotonic()
            for _ in range(at_once):
                torch.mm(matrix, matrix)
            bench.sync()
            times.append(SYSTEM.monotonic() - began)
        return statistics.mean(times)

    seconds = 0.2 if bench.small else 2.0
    products(seconds)
    ratios = []
    for _ in range(3):
        alone = products(seconds)
        stop.clear()
        thread = threading.Thread(target=copy, daemon=True)
        thread.start()
        beside = products(seconds)
        stop.set()
        thread.join()
        ratios.append(beside / alone)
    bench.say("snapshot_slowdown", 100 * (statistics.median(ratios) - 1), "%", all=ratios, snapshots=copies[0])


def _late_work(bench: Bench, device: ComputeDevice) -> None:
    """Copy tensors that are made contiguous behind a long queue, with the trainer's own code.

    A control takes its mark too early: if that shows nothing, the case is too tame to prove anything. On a busy host
    the queue may be empty before the copy begins, so the control's queue grows until it shows.
    """
    number = 6 if bench.small else 24
    wrong = _copied_late(bench, device, number, early=False, length=20)
    bench.say("late_work", wrong, "tensors wrong", of=number)
    for doubled in range(6):
        wrong = _copied_late(bench, device, number, early=True, length=20 << doubled)
        if wrong:
            break
    bench.say("late_work_control", wrong, "tensors wrong, as they should be", of=number)


def _copied_late(bench: Bench, device: ComputeDevice, number: int, *, early: bool, length: int) -> int:
    """Return how many of `number` copies are wrong that began behind a queue of so many products."""
    rows, columns = (64, 48) if bench.small else (4096, 2048)
    work = torch.ones(128 if bench.small else 8192, device=device.torch_device).diag()
    sources = [torch.zeros(columns, rows, device=device.torch_device) for _ in range(number)]
    bench.sync()
    for _ in range(length):
        work = work @ work
    # Values of its own each time: memory that is used again may hold those of the time before.
    first = 101.0 + length if early else 1.0
    for index, source in enumerate(sources):
        source.fill_(index + first)
    tiles = [
        (
            TensorSpec(key=f"t{index}", dtype="float32", shape=(rows, columns)),
            Box(start=(0, 0), stop=(rows, columns)),
        )
        for index in range(number)
    ]
    arena, done = Arena.create(), threading.Event()
    copier = Copier([arena], device)
    mark = device.mark()
    copy = prepare(
        [(spec, box, source.T) for (spec, box), source in zip(tiles, sources, strict=True)],
        None,
        device,
        acquire=lambda: 0,
        complete=partial(_arrived, done),
    )
    if early:
        copy = Copy(table=copy.table, tensors=copy.tensors, after=mark, acquire=copy.acquire, complete=copy.complete)
    copier.start(copy)
    copier.finish()
    assert done.is_set()
    data = rings.tensor_over(arena.view(copy.table.nbytes))
    bench.sync()
    return sum(
        not bool((data[e.offset : e.offset + e.nbytes].view(torch.float32) == index + first).all())
        for index, e in enumerate(copy.table.entries)
    )


def _arrived(done: threading.Event, buffer: int, digests: Sequence[str]) -> None:
    done.set()


def _digest(data: memoryview, threads: int) -> bytes:
    return blake3.blake3(data, max_threads=threads).digest()


def _registered(bench: Bench, moves: Sequence[Move], nbytes: int, target: torch.Tensor) -> None:
    """Pin the arena itself, as each generation would have to."""
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    began = SYSTEM.monotonic()
    code = int(runtime.cudaHostRegister(target.data_ptr(), nbytes, 0))
    seconds = SYSTEM.monotonic() - began
    if code:
        raise RuntimeError(f"cudaHostRegister answered {code}")
    bench.say("registering", nbytes / GB / seconds, "GB/s", seconds=seconds)
    try:
        _speed(bench, "registered", nbytes, lambda: rings.copy_queued(moves, target))
        _speed(bench, "copy_back", nbytes, lambda: rings.copy_back(moves, target, queued=True), way="registered")
    finally:
        bench.sync()
        began = SYSTEM.monotonic()
        runtime.cudaHostUnregister(target.data_ptr())
        bench.say("unregistering", SYSTEM.monotonic() - began, "s")


def _digests(bench: Bench, view: memoryview) -> None:
    part = view[: min(len(view), 4 * 10**9)]
    cores = len(os.sched_getaffinity(0))
    for threads in (1, 4, 8):
        with bench.attempting("blake3", threads=threads):
            seconds = bench.seconds(partial(_digest, part, threads), repeats=3, warm=0)
            bench.say("blake3", len(part) / GB / seconds, "GB/s", threads=threads, cores=cores)

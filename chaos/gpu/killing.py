"""P2: SIGKILL to a process that holds the device's memory under running work: when is the memory there again?"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import tempfile
import time
from dataclasses import dataclass

import torch
from torch import nn

from chaos.gpu import emulated_device
from chaos.gpu.bench import GB, Bench
from chaos.gpu.forked import Child, Talk
from elastic3d.clock import SYSTEM
from elastic3d.devices import ComputeDevice, device_at
from elastic3d.devices.cpu import host_memory

HELD, PINNED = 100 * 10**9, 20 * 10**9
NEAR = 0.98
POLL = 0.002
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What the killed process had besides memory on the device. child: one it had forked. pinned: bytes of the host."""

    name: str
    child: bool = False
    pinned: int = 0


def measure(bench: Bench) -> None:
    """Say, for each case, the seconds from the kill to each thing."""
    if bench.kind == "emulated":
        os.environ[emulated_device.FOLDER] = tempfile.mkdtemp()
    pinned = min(PINNED, host_memory() // 5) if bench.cuda else 1 << 20
    cases = [Case(name="alone"), Case(name="with a forked child", child=True), Case(name="pinned", pinned=pinned)]
    # What a killed process had forked comes to this one to be reaped, wherever the system's first process does not.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    # All are forked before this process has a context; each waits for its turn.
    holders = [(case, Child(_hold, bench.kind, case)) for case in [*cases, cases[0]]]
    try:
        device = bench.opened()
        for number, (case, holder) in enumerate(holders):
            with bench.attempting("memory_back", case=case.name):
                _kill(bench, device, case, holder, allocate=number == len(holders) - 1)
    finally:
        for _, holder in holders:
            holder.end()


def _hold(talk: Talk, kind: str, case: Case) -> None:
    """Hold memory and keep the device busy, until killed."""
    wanted = talk.hear()
    device = device_at(kind, 0)
    device.open()
    device.place(nn.Module())
    held = torch.empty(wanted, dtype=torch.uint8, device=device.torch_device)
    held.fill_(1)
    host = torch.empty(case.pinned, dtype=torch.uint8, pin_memory=kind == "cuda") if case.pinned else None
    if case.child and os.fork() == 0:
        time.sleep(600)
        os._exit(0)
    matrix = torch.ones(4096 if kind == "cuda" else 64, device=device.torch_device).diag()
    talk.say(held.numel() + (0 if host is None else host.numel()))
    while True:
        for _ in range(20):
            matrix = matrix @ matrix
        if kind == "cuda":
            torch.cuda.synchronize()


def _kill(bench: Bench, device: ComputeDevice, case: Case, holder: Child, *, allocate: bool) -> None:
    before = device.free()
    wanted = min(HELD, int(before * 0.7)) if bench.cuda else 1 << 20
    holder.pipe.send(wanted)
    holder.answer(min(60.0, bench.left() - 2))
    held = before - device.free()
    SYSTEM.sleep(0.2)
    killed = SYSTEM.monotonic()
    os.killpg(holder.pid, signal.SIGKILL)
    holder.reap()
    reaped = SYSTEM.monotonic()
    detail = {"case": case.name, "held_gb": round(held / GB, 1), "pinned_gb": round(case.pinned / GB, 1)}
    bench.say("reaped", reaped - killed, "s", **detail)
    if allocate:
        while True:
            try:
                sibling = torch.empty(wanted, dtype=torch.uint8, device=device.torch_device)
                break
            except torch.OutOfMemoryError:
                if SYSTEM.monotonic() - reaped > 20:
                    raise
        bench.sync()
        bench.say("sibling_allocation", SYSTEM.monotonic() - reaped, "s after reaping", **detail)
        del sibling
        if bench.cuda:
            torch.cuda.empty_cache()
        return
    gone = back = None
    while (gone is None or back is None) and SYSTEM.monotonic() - reaped < min(20.0, bench.left() - 2):
        if gone is None and not _group_lives(holder.pid):
            gone = SYSTEM.monotonic()
        # The host's memory is everybody's: what others take and give back says nothing.
        if back is None and (bench.kind == "cpu" or device.free() >= NEAR * before):
            back = SYSTEM.monotonic()
        SYSTEM.sleep(POLL)
    bench.say("group_gone", None if gone is None else gone - killed, "s", **detail)
    if bench.kind != "cpu":
        # Not back yet counts as the seconds it was waited for.
        waited = (back or SYSTEM.monotonic()) - reaped
        bench.say("memory_back", waited, "s after reaping", **detail, back=back is not None)


def _group_lives(group: int) -> bool:
    with contextlib.suppress(ChildProcessError):
        os.waitpid(-group, os.WNOHANG)
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True

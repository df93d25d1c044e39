"""P3: what a process that begins to use the device costs the one that trains on it."""

from __future__ import annotations

import statistics
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from chaos.gpu.bench import MIB, Bench
from chaos.gpu.forked import Child, Talk
from chaos.scripts.train_gpt import GPT, cross_entropy
from elastic3d.clock import SYSTEM
from elastic3d.devices import device_at


def measure(bench: Bench) -> None:
    """Say a step's time before, while another process opens the device and builds, and while its model stays there."""
    width, blocks = (64, 2) if bench.small else (1024, 12)
    seconds = 0.5 if bench.small else 3.0
    builder = Child(_build, bench.kind, width, blocks)
    try:
        device = bench.opened()
        model = GPT(width=width, blocks=blocks, context=64).to(device.torch_device)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        text = torch.zeros(4, 64, dtype=torch.int64, device=device.torch_device)

        def step() -> None:
            torch.autograd.backward(cross_entropy(model(text), text))
            optimizer.step()
            optimizer.zero_grad()

        def steps(enough: Any) -> list[float]:
            times: list[float] = []
            while not enough(times):
                began = SYSTEM.monotonic()
                step()
                bench.sync()
                times.append(SYSTEM.monotonic() - began)
            return times

        for _ in range(5):
            step()
        with bench.attempting("two_process_groups"):
            dist.init_process_group(device.backend, store=HashStore(), rank=0, world_size=1)
            dist.all_reduce(torch.ones(1 << 20, device=device.torch_device))
        used = _used(bench)
        alone = steps(lambda times: sum(times) > seconds)
        builder.pipe.send(None)
        beside = steps(lambda times: builder.pipe.poll() or bench.left() < 5)
        built = builder.answer(1.0)
        after = steps(lambda times: sum(times) > seconds)
        base = statistics.median(alone)
        bench.say("step", base, "s", when="alone", steps=len(alone))
        if beside:
            bench.say("step", statistics.median(beside), "s", when="while the other builds", steps=len(beside))
            bench.say("step_longest", max(beside), "s", when="while the other builds")
            slower = 100 * (statistics.mean(beside) / statistics.mean(alone) - 1)
            bench.say("two_contexts_slowdown", slower, "%", when="while the other builds")
        slower = 100 * (statistics.median(after) / base - 1)
        bench.say("two_contexts_slowdown", slower, "%", when="while the other's model stays")
        for part, value in built.items():
            bench.say("other_process", value, "s" if part != "collective" else "", part=part)
        bench.say("other_memory", None if used is None else _mib(bench, used), "MiB", what="context, NCCL and model")
    finally:
        builder.end()


def _used(bench: Bench) -> int | None:
    if not bench.cuda:
        return None
    free, total = torch.cuda.mem_get_info(0)
    return int(total - free)


def _mib(bench: Bench, before: int) -> float:
    return round(((_used(bench) or 0) - before) / MIB, 1)


def _build(talk: Talk, kind: str, width: int, blocks: int) -> None:
    """Open the device, make a communicator of one and a model, say so, and stay."""
    talk.hear()
    parts: dict[str, Any] = {}
    began = SYSTEM.monotonic()
    device = device_at(kind, 0)
    device.open()
    parts["context"] = SYSTEM.monotonic() - began
    try:
        dist.init_process_group(device.backend, store=HashStore(), rank=0, world_size=1)
        dist.all_reduce(torch.ones(1 << 20, device=device.torch_device))
        parts["collective"] = "worked"
    except (RuntimeError, ValueError) as error:
        parts["collective"] = f"{type(error).__name__}: {error}"[:200]
    parts["context and communicator"] = SYSTEM.monotonic() - began
    model = GPT(width=width, blocks=blocks, context=64).to(device.torch_device)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    text = torch.zeros(4, 64, dtype=torch.int64, device=device.torch_device)
    torch.autograd.backward(cross_entropy(model(text), text))
    optimizer.step()
    if kind == "cuda":
        torch.cuda.synchronize()
    parts["until its first step"] = SYSTEM.monotonic() - began
    talk.say(parts)
    talk.hear()

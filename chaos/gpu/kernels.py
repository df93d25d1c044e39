"""P5: the arithmetic of a step: the vote's stall, the ordered fold, norms, and what determinism costs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from chaos.gpu.bench import GB, Bench
from chaos.gpu.worlds import Bytes
from chaos.scripts.train_gpt import GPT, cross_entropy
from elastic3d.clock import SYSTEM
from elastic3d.devices import ComputeDevice, device_at
from elastic3d.devices.contract import deterministic
from elastic3d.devices.cuda import add_rows
from elastic3d.parallel.norms import row_squares
from elastic3d.training import Run, run_alone
from elastic3d.training import run as run_module

PIECES = (2, 8, 64, 256)


def measure(bench: Bench) -> None:
    """Say each in turn; one that fails leaves the others alone."""
    with bench.attempting("vote_stall"):
        _vote(bench)
    computes_on = bench.opened()
    device = computes_on.torch_device
    deterministic()
    for number in PIECES:
        with bench.attempting("fold", pieces=number):
            _fold(bench, computes_on, number)
    with bench.attempting("row_squares"):
        _row_squares(bench, computes_on)
    with bench.attempting("fill"):
        _fill(bench, device)
    with bench.attempting("attention"):
        _attention(bench, device)
    for way in ("foreach", "fused"):
        with bench.attempting("adamw", way=way):
            _adamw(bench, device, way)


def _vote(bench: Bench) -> None:
    """Train a few steps of a world of one, and time each vote from where the device has nothing else to do."""
    width, blocks, steps = (64, 2, 3) if bench.small else (1024, 24, 6)
    times: list[float] = []
    # What a step calls, wherever the vote's parts are.
    module: Any = run_module
    real = module.vote

    def timed(*given: Any, **named: Any) -> Any:
        bench.sync()
        began = SYSTEM.monotonic()
        outcome = real(*given, **named)
        bench.sync()
        times.append(1e3 * (SYSTEM.monotonic() - began))
        return outcome

    def main(run: Run) -> None:
        model = run.shard(lambda: GPT(width=width, blocks=blocks, context=64), blocks="blocks", seed=3)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        batches = run.batches(Bytes(64), global_batch=8, micro_batch=2, seed=1)
        run.restore(model=model, optimizer=optimizer, batches=batches)
        for batch in batches.until(step=steps):
            run.step(optimizer, loss=run.backward(model, batch, cross_entropy), clip=1.0)

    module.vote = timed
    try:
        run_alone(main, threads=1, device=bench.kind)
    finally:
        module.vote = real
    later = sorted(times[2:] or times)
    bench.say("vote_stall", later[len(later) // 2], "ms", width=width, blocks=blocks, first=round(times[0], 3))


def _fold(bench: Bench, device: ComputeDevice, number: int) -> None:
    """Time the sum of pieces as reductions make it on the device, and row by row; compare their bits."""
    where = device.torch_device
    count = (1 << 12) if bench.small else (1 << 30) // number // 4
    generator = torch.Generator(device=where).manual_seed(number)
    rows = torch.randn(number, count, device=where, generator=generator)
    narrow = rows.to(torch.bfloat16)
    wide = narrow.to(torch.float32)
    detail: dict[str, Any] = {"pieces": number, "elements": count}

    def added(add: Callable[[torch.Tensor, torch.Tensor, bool], None], pieces: torch.Tensor) -> torch.Tensor:
        total = torch.empty(count, device=where)
        add(total, pieces, True)
        return total

    for way, add in (("row by row", add_rows), ("the device's own", device.add_rows)):
        for kind, pieces in (("fp32", rows), ("bf16", narrow)):
            seconds = bench.seconds(partial(added, add, pieces), repeats=3)
            bench.say("fold", pieces.nbytes / GB / seconds, "GB/s", way=way, dtype=kind, **detail)
    expected, of_wide = added(add_rows, rows), added(add_rows, wide)
    bench.say("fold_bits", torch.equal(expected, added(device.add_rows, rows)), way="the device's own", **detail)
    bench.say("fold_bits", torch.equal(of_wide, added(add_rows, narrow)), way="bf16 pieces, fp32 sum", **detail)
    bench.say("fold_bits", torch.equal(of_wide, added(device.add_rows, narrow)), way="bf16, the device's own", **detail)
    bench.say("fold_bits", torch.equal(expected, rows.sum(0)), way="torch's sum, no promise", **detail)


def _row_squares(bench: Bench, device: ComputeDevice) -> None:
    """Time it by the device's own way and by the fold that it stands for, and compare their bits."""
    rows = 64 if bench.small else 65536
    host = device_at("cpu", 0)
    for length in (48, 64) if bench.small else (1024, 4096, 5120, 11008):
        shape = (rows * 1024 // length // (32 if bench.small else 1), length)
        gradient = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(device.torch_device)
        for way, how in (("kernel", device), ("fold", host)):
            seconds = bench.seconds(partial(row_squares, [gradient], how), repeats=3)
            bench.say("row_squares", gradient.nbytes / GB / seconds, "GB/s", shape=list(shape), way=way)
        part = slice(shape[0] // 3, shape[0] // 2)
        whole, own = row_squares([gradient], device), row_squares([gradient[part].clone()], device)
        bench.say("row_squares_bits", torch.equal(whole[part], own), length=length)
        there = row_squares([gradient.cpu()], host)
        bench.say("row_squares_as_cpu", torch.equal(whole.cpu(), there), length=length)


def _fill(bench: Bench, device: torch.device) -> None:
    count = 1 << 12 if bench.small else 1 << 28

    def allocate() -> None:
        for _ in range(10):
            torch.empty(count, device=device)

    for on in (True, False):
        torch.utils.deterministic.fill_uninitialized_memory = on  # type: ignore[attr-defined]
        bench.say("empty", bench.seconds(allocate, repeats=3) / 10, "s", fill=on, nbytes=4 * count)


def _attention(bench: Bench, device: torch.device) -> None:
    length, heads = (64, 2) if bench.small else (4096, 16)
    number = torch.bfloat16 if bench.cuda else torch.float32
    generator = torch.Generator().manual_seed(2)
    made = [torch.randn(2, heads, length, 64, generator=generator).to(device, number) for _ in range(3)]
    q, k, v = (tensor.requires_grad_() for tensor in made)

    def work() -> torch.Tensor:
        q.grad = None
        torch.autograd.backward(functional.scaled_dot_product_attention(q, k, v, is_causal=True).sum())
        assert q.grad is not None
        return q.grad

    for on in (True, False):
        torch.use_deterministic_algorithms(on)
        first = work().clone()
        same = all(torch.equal(first, work()) for _ in range(3))
        bench.say("attention", bench.seconds(work, repeats=5), "s", deterministic=on, same_bits=same, length=length)
    torch.use_deterministic_algorithms(True)


def _adamw(bench: Bench, device: torch.device, way: str) -> None:
    """Time it, and compare the bits of a parameter that is updated whole with those of its slices."""
    count = (1 << 12) + 5 if bench.small else (1 << 28) + 5
    generator = torch.Generator(device=device).manual_seed(4)
    values = torch.randn(count, device=device, generator=generator)
    gradient = torch.randn(count, device=device, generator=generator)

    def updated(cuts: int) -> torch.Tensor:
        parameters = [torch.nn.Parameter(part.clone()) for part in values.chunk(cuts)]
        optimizer = torch.optim.AdamW(parameters, lr=1e-3, **{way: True})  # type: ignore[arg-type]
        for _ in range(3):
            for parameter, part in zip(parameters, gradient.chunk(cuts), strict=True):
                parameter.grad = part.clone()
            optimizer.step()
        return torch.cat([parameter.detach() for parameter in parameters])

    whole = updated(1)
    for cuts in (2, 3, 7):
        bench.say("adamw_bits", torch.equal(whole, updated(cuts)), way=way, cuts=cuts)
    parameter = torch.nn.Parameter(values)
    parameter.grad = gradient
    optimizer = torch.optim.AdamW([parameter], lr=1e-3, **{way: True})  # type: ignore[arg-type]
    seconds = bench.seconds(lambda: optimizer.step(), repeats=3)
    bench.say("adamw", seconds, "s", way=way, elements=count)

"""Mains of audited runs in which something goes wrong between ranks, or where what they send each other is added up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from elastic3d.devices.cpu import CpuDevice
from elastic3d.training import Run
from tests.parallel.models import Model, Sentences, loss_fn

STEPS = 5


@dataclass(frozen=True, kw_only=True)
class Wrong:
    """What goes wrong on a rank. step: the first in which it does. times: how often from then on.

    what: "wire" for what arrives of the pieces of `sender` (of all others with -1), "fold" for what it adds up,
    "gather" for a weight that it has gathered, and `sender` owns; "script" where every rank writes to such weights.
    """

    rank: int
    what: str
    step: int = 1
    times: int = 1
    sender: int = -1


class Faults:
    """Those of one rank. step: the present one."""

    def __init__(self, run: Run, given: Sequence[Wrong]) -> None:
        self.run, self.step = run, -1
        self._left = {one: one.times for one in given if one.rank == run.rank or one.what == "script"}

    def now(self, *what: str) -> Wrong | None:
        """Return the fault of this kind that happens now."""
        for one, left in self._left.items():
            if one.what in what and left and self.step >= one.step:
                self._left[one] -= 1
                return one
        return None


def flip(tensor: torch.Tensor, at: int = 0) -> None:
    """Flip a bit as memory does: torch counts no write."""
    tensor.data.view(-1).view(torch.uint8)[at * tensor.itemsize + 1] ^= 1 << 4


def train(run: Run, *, wrong: Sequence[Wrong] = (), steps: int = STEPS, leaf: int = 1) -> str:
    """Train the small model, every step audited; return the digest."""
    faults = Faults(run, wrong)
    _break_wire(faults)
    _break_adding(faults)
    model = run.shard(lambda: Model(), blocks="blocks", seed=3, leaf=leaf)
    _break_weights(faults, model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batches = run.batches(Sentences(), global_batch=16, micro_batch=2, seed=11)
    run.restore(model=model, optimizer=optimizer, batches=batches)
    for batch in batches.until(step=steps):
        faults.step = batch.step
        loss = run.backward(model, batch, loss_fn)
        faults.step = -1
        run.step(optimizer, loss=loss, clip=0.5)
    return run.digest()


def _break_wire(faults: Faults) -> None:
    """Have what arrives in an exchange of pieces be otherwise."""
    honest = dist.all_to_all_single

    def exchange(into: torch.Tensor, out: torch.Tensor, *given: Any, **named: Any) -> Any:
        work = honest(into, out, *given, **named)
        one = faults.now("wire") if into.dtype == torch.uint8 and into.numel() else None
        if one is None:
            return work
        size = into.numel() // dist.get_world_size(named["group"])
        senders = [one.sender] if one.sender >= 0 else range(into.numel() // size)

        def spoil() -> None:
            for sender in senders:
                flip(into, sender * size)

        if work is None:
            spoil()
            return None
        return _Spoilt(work, spoil)

    dist.all_to_all_single = exchange


class _Spoilt:
    def __init__(self, work: Any, spoil: Callable[[], None]) -> None:
        self._work, self._spoil = work, spoil

    def wait(self) -> None:
        self._work.wait()
        self._spoil()


def _break_adding(faults: Faults) -> None:
    """Have the device err in the first number of a sum: in every sum of the step, since one of them is looked at."""
    honest, erring = CpuDevice.add_rows, []

    def add(self: CpuDevice, total: torch.Tensor, rows: torch.Tensor, begins: bool) -> None:
        honest(self, total, rows, begins)
        one = faults.now("fold")
        if one is not None and total.numel():
            erring.append(one)
            flip(total)

    CpuDevice.add_rows = add  # type: ignore[method-assign]


def _break_weights(faults: Faults, model: nn.Module) -> None:
    """Have a weight of a block change where a rank has gathered it."""

    def spoil(module: nn.Module, inputs: Any) -> None:
        one = faults.now("gather", "script")
        if one is not None:
            weight = next(module.parameters())
            shards = faults.run.layout.shards
            if one.what == "script":
                weight.data.mul_(0.999)
            else:
                rows = -(-weight.shape[0] // shards)
                flip(weight, rows * one.sender * weight[0].numel())

    for block in list(model.blocks)[:1]:  # type: ignore[arg-type]
        block.register_forward_pre_hook(spoil)

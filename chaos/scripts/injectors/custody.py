"""What no audit of passes repeats goes wrong on one rank, once: a vote, an update, or what ranks exchange."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import adam

from chaos.scripts.injectors.astray import Begin, Waiting, instead_of_vote, put
from chaos.scripts.injectors.fault import Fault
from elastic3d.devices import cpu
from elastic3d.parallel.mesh import Mesh
from elastic3d.parallel.state import local

BIT = 1 << 12


def vote(fault: Fault) -> None:
    """Have the last number of the next vote be another one where it arrives: a part of the gradient's norm."""

    def altered(mesh: Mesh, votes: Tensor, begin: Begin) -> Waiting:
        wait = begin(mesh, votes)

        def then_flip() -> Tensor:
            said = wait()
            said.view(torch.int64)[-1] ^= 1 << 51
            return said

        return then_flip

    instead_of_vote(altered)


def update(fault: Fault) -> None:
    """Have every number of the rank's next update differ in a bit, and nothing that it computes again for others."""
    assert fault.optimizer is not None
    own = {local(one).data_ptr() for group in fault.optimizer.param_groups for one in group["params"]}
    honest = adam.adam

    def wrong(params: list[Tensor], *given: Any, **named: Any) -> None:
        honest(params, *given, **named)
        if any(one.data_ptr() in own for one in params if one.numel()):
            put(adam, "adam", honest)
            _spoil(params)

    put(adam, "adam", wrong)


def updates(fault: Fault) -> None:
    """Have every number of all updates differ in a bit from now on, of those that it computes for others too."""
    honest = adam.adam

    def wrong(params: list[Tensor], *given: Any, **named: Any) -> None:
        honest(params, *given, **named)
        _spoil(params)

    put(adam, "adam", wrong)


def _spoil(params: list[Tensor]) -> None:
    for one in params:
        one.data.view(torch.int32).bitwise_xor_(BIT)


def wire(fault: Fault) -> None:
    """Have a bit of what the next rank of the group sends differ where it arrives, in the next exchange of pieces."""
    honest = dist.all_to_all_single

    def exchange(into: Tensor, out: Tensor, received: list[int] | None = None, *given: Any, **named: Any) -> Any:
        work = honest(into, out, received, *given, **named)
        group = named["group"]
        sender = (group.rank() + 1) % group.size()
        if not received or not received[sender]:
            return work
        put(dist, "all_to_all_single", honest)
        return _Altered(work, lambda: _flip_byte(into, sum(received[:sender])))

    put(dist, "all_to_all_single", exchange)


class _Altered:
    """What is under way, and is altered where it has arrived."""

    def __init__(self, work: Any, alter: Callable[[], None]) -> None:
        self._work, self._alter = work, alter

    def wait(self) -> None:
        self._work.wait()
        self._alter()


def fold(fault: Fault) -> None:
    """Have the device err once in each sum of gradients to which it adds, in a step of several rounds."""
    honest, erred = cpu.add_rows, set()

    def add(total: Tensor, rows: Tensor, begins: bool) -> None:
        honest(total, rows, begins)
        # What another rank has it add again comes all at once, and begins a sum.
        if not begins and total.numel() and total.data_ptr() not in erred:
            erred.add(total.data_ptr())
            _flip_byte(total, 0)

    # Sums hold on to the device's method, which calls this.
    put(cpu, "add_rows", add)


def gathered(weight: Tensor, rank: int) -> None:
    """Flip a bit of a weight that a rank has gathered, in what another rank owns of it."""
    _flip_byte(weight, 0 if rank else (weight.numel() - 1) * weight.element_size())


def _flip_byte(tensor: Tensor, at: int) -> None:
    """Flip a bit of the byte after this one, as memory does: torch counts no write."""
    tensor.data.view(-1).view(torch.uint8)[at + 1] ^= 1 << 4

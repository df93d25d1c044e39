"""A rank that leaves the program of collectives that all others follow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from chaos.scripts.injectors.fault import Fault
from elastic3d.health.phases import Axis
from elastic3d.health.record import fingerprint
from elastic3d.parallel.mesh import Mesh
from elastic3d.parallel.reduction.lanes import Lane

Waiting = Callable[[], Tensor]
Begin = Callable[[Mesh, Tensor], Waiting]

_BOTH = 99


def fail(fault: Fault) -> None:
    raise RuntimeError(f"rank {fault.rank} was asked to raise")


def misuse(fault: Fault) -> None:
    """Call the runtime as nobody may: it says what to change, and trying again cannot mend it."""
    assert fault.run is not None
    with fault.run.pause("eval", "a while"):
        pass


def skip(fault: Fault) -> None:
    whole = Lane.exchange

    def nothing(self: Lane, *given: Any) -> None:
        return None

    put(Lane, "exchange", nothing)

    def last(mesh: Mesh, votes: Tensor, begin: Begin) -> Waiting:
        wait = begin(mesh, votes)

        def then_mend() -> Tensor:
            put(Lane, "exchange", whole)
            return wait()

        return then_mend

    instead_of_vote(last)


def order(fault: Fault) -> None:
    def first(mesh: Mesh, votes: Tensor, begin: Begin) -> Waiting:
        mesh.gather(b"something else")
        return begin(mesh, votes)

    instead_of_vote(first)


def shape(fault: Fault) -> None:
    def larger(mesh: Mesh, votes: Tensor, begin: Begin) -> Waiting:
        wait = begin(mesh, torch.cat([votes] * 3))
        return lambda: wait()[: votes.numel()]

    instead_of_vote(larger)


def dtype(fault: Fault) -> None:
    def other(mesh: Mesh, votes: Tensor, begin: Begin) -> Waiting:
        wait = begin(mesh, votes.float())
        return lambda: wait().to(votes.dtype)

    instead_of_vote(other)


def deadlock(fault: Fault) -> None:
    """All ranks take part, and the one at fault in another order."""
    instead_of_vote(_both_groups(first=fault.rank == fault.of))


def _both_groups(*, first: bool) -> Callable[[Mesh, Tensor, Begin], Waiting]:
    """Return what meets in the world and in the group of dp before it votes; first: in the world first."""

    def in_dp(mesh: Mesh) -> None:
        number = mesh.progress.enter(Axis.DP, fingerprint(_BOTH))
        dist.all_reduce(torch.zeros(1), group=mesh.groups["dp"])
        mesh.progress.leave(Axis.DP, number)

    def both(mesh: Mesh, votes: Tensor, begin: Begin) -> Waiting:
        if not first:
            in_dp(mesh)
        mesh.gather(b"both")
        if first:
            in_dp(mesh)
        return begin(mesh, votes)

    return both


def put(owner: object, name: str, method: Callable[..., Any]) -> None:
    """Have an attribute of a class or a module be another one."""
    setattr(owner, name, method)


def instead_of_vote(other: Callable[[Mesh, Tensor, Begin], Waiting]) -> None:
    """Have `other` called in the place of the next vote only."""
    begin = Mesh.begin_sum

    def once(mesh: Mesh, votes: Tensor) -> Waiting:
        put(Mesh, "begin_sum", begin)
        return other(mesh, votes, begin)

    put(Mesh, "begin_sum", once)

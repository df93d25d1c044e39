"""Mains of worlds in which sums go from replica to replica, also where replicas have two ranks only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from elastic3d.parallel.reduction.ordered import Ordered
from elastic3d.parallel.reduction.passed import Passing
from elastic3d.planner import passing
from elastic3d.training import Run


@dataclass(frozen=True, kw_only=True)
class PassedOn:
    """What the main returned, the bytes of each sum that went to the next replica, and of each that went to all.

    idle: the most numbers of sums that were held in a step that did not use them.
    """

    trained: Any
    sent: tuple[int, ...]
    spread: tuple[int, ...]
    idle: int


def passed_on(main: Callable[[Run], Any], run: Run) -> PassedOn:
    """Run a main with sums that are passed on, and count them."""
    sent: list[int] = []
    spread: list[int] = []
    idle: list[int] = [0]
    send, give, begin = Passing.send, Passing.spread, Ordered.begin_step

    def counted(self: Passing, part: torch.Tensor, *, again: bool) -> Any:
        sent.append(part.nbytes)
        return send(self, part, again=again)

    def given(self: Passing, part: torch.Tensor, going: Any) -> None:
        spread.append(part.nbytes)
        give(self, part, going)

    def begun(self: Ordered, *args: Any, **options: Any) -> None:
        begin(self, *args, **options)
        idle.append(sum(fold._sum.numel() for fold in (*self._folds, *self._passed) if fold not in self._used))

    passing.LEAST = 2
    Passing.send, Passing.spread = counted, given  # type: ignore[method-assign]
    Ordered.begin_step = begun  # type: ignore[method-assign]
    return PassedOn(trained=main(run), sent=tuple(sent), spread=tuple(spread), idle=max(idle))

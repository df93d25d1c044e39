"""Mains of worlds in which sums go from replica to replica, also where replicas have two ranks only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from elastic3d.parallel.reduction.passed import Passing
from elastic3d.planner import passing
from elastic3d.training import Run


@dataclass(frozen=True, kw_only=True)
class PassedOn:
    """What the main returned, the bytes of each sum that went to the next replica, and of each that went to all."""

    trained: Any
    sent: tuple[int, ...]
    spread: tuple[int, ...]


def passed_on(main: Callable[[Run], Any], run: Run) -> PassedOn:
    """Run a main with sums that are passed on, and count them."""
    sent: list[int] = []
    spread: list[int] = []
    send, give = Passing.send, Passing.spread

    def counted(self: Passing, part: torch.Tensor, *, again: bool) -> Any:
        sent.append(part.nbytes)
        return send(self, part, again=again)

    def given(self: Passing, part: torch.Tensor, going: Any) -> None:
        spread.append(part.nbytes)
        give(self, part, going)

    passing.LEAST = 2
    Passing.send, Passing.spread = counted, given  # type: ignore[method-assign]
    return PassedOn(trained=main(run), sent=tuple(sent), spread=tuple(spread))

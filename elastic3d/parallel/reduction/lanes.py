"""Memory through which gradients go from rank to rank: two pairs of buffers, whatever the number and size of units.

While one unit's pieces are under way the next unit's are copied in, so that sending goes on beside the backward pass. A
buffer grows to the largest unit and is kept, but to no more than a bound: larger units go in parts. Where some ranks
are to be ahead of others there are as many pairs as a turn has exchanges.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from elastic3d.health.phases import Axis
from elastic3d.health.record import fingerprint
from elastic3d.parallel.dtypes import dtype_mark
from elastic3d.parallel.reduction.transit import Transit
from elastic3d.planner.memory import BUCKET
from elastic3d.port import UNRECORDED, Progress

DEPTH = 2

Arrived = Callable[[torch.Tensor], None]


class Lane:
    """A pair of buffers, and what is under way in them. axis: of the ranks that exchange it."""

    def __init__(self, progress: Progress = UNRECORDED, axis: Axis = Axis.DP) -> None:
        self._progress, self.axis = progress, axis
        self._out = torch.empty(0, dtype=torch.uint8)
        self._in = torch.empty(0, dtype=torch.uint8)
        self._pending: tuple[Any, torch.Tensor, Arrived, int, int] | None = None

    @property
    def held(self) -> int:
        """Bytes of the larger buffer."""
        return max(self._out.numel(), self._in.numel())

    def outgoing(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return room for what is to be sent; nothing may be under way."""
        assert self._pending is None
        self._out = _at_least(self._out, numel * dtype.itemsize, device)
        return self._out[: numel * dtype.itemsize].view(dtype)

    def exchange(
        self,
        out: torch.Tensor,
        splits: Sequence[int],
        mine: int,
        group: dist.ProcessGroup,
        arrived: Arrived,
        senders: Sequence[int],
        transit: Transit | None = None,
    ) -> None:
        """Send splits[i] numbers to rank i, and have `arrived` called with the `mine` numbers that each sender sends.

        A rank that is none of the senders sends nothing, whatever is in `out`: its splits are those of the others.
        transit: what looks at numbers as they leave and as they arrive.
        """
        item, rank = out.dtype.itemsize, group.rank()
        self._in = _at_least(self._in, len(senders) * mine * item, out.device)
        pieces = self._in[: len(senders) * mine * item]
        # The same on all ranks, unlike what each receives.
        mark = fingerprint(dtype_mark(out.dtype), sum(splits))
        received = [0] * group.size()
        for sender in senders:
            received[sender] = mine * item
        sends = rank in senders
        if transit is not None:
            counts = [numbers // item for numbers in received]
            arrived = _seen(transit, transit.sends(out, splits if sends else ()), counts, arrived)
        number = self._progress.post(self.axis, mark)
        # As bytes: they are moved, not computed with, and gloo does not know every dtype.
        work = dist.all_to_all_single(
            pieces,
            out.view(torch.uint8) if sends else out[:0].view(torch.uint8),
            received,
            [split * item if sends else 0 for split in splits],
            group=group,
            async_op=True,
        )
        self._pending = (work, pieces.view(out.dtype).view(len(senders), mine), arrived, number, mark)

    def settle(self) -> None:
        """Wait for what is under way and hand it over."""
        if self._pending is not None:
            work, pieces, arrived, number, mark = self._pending
            self._pending = None
            self._progress.wait(self.axis, number, mark)
            work.wait()
            self._progress.leave(self.axis, number)
            arrived(pieces)


class Lanes:
    """All lanes of a rank, used in turn, so that what was sent first is handed over first."""

    bound = BUCKET
    """Bytes of what may be sent at once."""
    transit: Transit | None = None
    """What looks at all that is sent, None in most steps."""

    def __init__(self, progress: Progress = UNRECORDED, axis: Axis = Axis.DP) -> None:
        self.progress, self._axis = progress, axis
        self._lanes = [Lane(progress, axis) for _ in range(DEPTH)]
        self._next = 0
        self.used = 0
        """How many times a lane was given out."""

    def meet_on(self, axis: Axis) -> None:
        """Have what is exchanged from here on recorded as this axis's; nothing may be under way."""
        self._axis = axis
        for lane in self._lanes:
            lane.axis = axis

    def deepen(self, depth: int) -> None:
        """Have so many lanes at least; nothing may be under way."""
        self._lanes += [Lane(self.progress, self._axis) for _ in range(depth - len(self._lanes))]
        self._next = 0

    def next(self) -> Lane:
        """Return the next lane, empty."""
        lane = self._lanes[self._next]
        self._next, self.used = (self._next + 1) % len(self._lanes), self.used + 1
        lane.settle()
        return lane

    def settle(self) -> None:
        """Wait for everything under way."""
        for _ in self._lanes:
            self.next()


def _seen(transit: Transit, number: int, counts: Sequence[int], arrived: Arrived) -> Arrived:
    def seen(pieces: torch.Tensor) -> None:
        transit.arrived(number, pieces.reshape(-1), counts)
        arrived(pieces)

    return seen


def _at_least(buffer: torch.Tensor, size: int, device: torch.device) -> torch.Tensor:
    if buffer.numel() >= size and buffer.device == device:
        return buffer
    return torch.empty(size, dtype=torch.uint8, device=device)

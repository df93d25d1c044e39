"""What pipeline ranks send each other, noted in the rank's progress record.

torch's schedules send, receive and wait through two functions of their module. While a step runs these are replaced by
ones that count each operation between two neighbours before they make it. The n-th one that a rank receives from a
neighbour is the n-th one that this sends to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed.pipelining import schedules
from torch.distributed.pipelining.schedules import _batch_p2p, _wait_batch_p2p

from elastic3d.health.phases import Axis
from elastic3d.health.record import fingerprint
from elastic3d.port import Progress


class RecordedNeighbours:
    """One rank's operations with its neighbours. rank, ranks: of the pipeline."""

    def __init__(self, progress: Progress, *, rank: int, ranks: int) -> None:
        self._progress, self._rank, self._ranks = progress, rank, ranks
        self._under_way: dict[int, tuple[Any, list[tuple[Axis, int, int]]]] = {}

    def axis(self, peer: int, *, sends: bool) -> Axis:
        """Return the axis of an operation with a neighbour; of two ranks the first one's next is the second."""
        following = peer == (self._rank + 1) % self._ranks and (self._ranks > 2 or peer > self._rank)
        if sends:
            return Axis.TO_NEXT if following else Axis.TO_PREVIOUS
        return Axis.FROM_NEXT if following else Axis.FROM_PREVIOUS

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Have what torch's schedules do inside noted."""
        module: Any = schedules

        def noted_batch(ops: Sequence[dist.P2POp], *args: Any, **kwargs: Any) -> list[Any]:
            numbers = [self._posted(op) for op in ops]
            works: list[Any] = _batch_p2p(list(ops), *args, **kwargs)
            if len(works) == len(numbers):
                for work, number in zip(works, numbers, strict=True):
                    self._under_way[id(work)] = (work, [number])
            elif works:  # some backends make one of several
                self._under_way[id(works[0])] = (works[0], numbers)
            return works

        def noted_wait(works: Sequence[Any]) -> None:
            for work in works:
                _, numbers = self._under_way.pop(id(work), (None, []))
                # What is received is waited for the longest: it is what shows.
                for axis, number, mark in sorted(numbers, key=lambda one: one[0] in _RECEIVING):
                    self._progress.wait(axis, number, mark)
                _wait_batch_p2p([work])
                for axis, number, _ in numbers:
                    self._progress.leave(axis, number)

        module._batch_p2p, module._wait_batch_p2p = noted_batch, noted_wait
        try:
            yield
        finally:
            module._batch_p2p, module._wait_batch_p2p = _batch_p2p, _wait_batch_p2p
            self._under_way.clear()

    def _posted(self, op: dist.P2POp) -> tuple[Axis, int, int]:
        axis = self.axis(op.group_peer, sends=op.op is dist.isend)
        mark = fingerprint(op.tensor.numel(), op.tensor.itemsize)
        return axis, self._progress.post(axis, mark), mark


_RECEIVING = (Axis.FROM_NEXT, Axis.FROM_PREVIOUS)

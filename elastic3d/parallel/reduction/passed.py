"""The same ordered sum, with fewer bytes between nodes: it goes to the pieces, instead of the pieces to it.

With replicas (HSDP) of S ranks each, a node, the pieces of a turn lie in the order of micro-batches on replica after
replica. Within a replica they go to the rank that holds the shard (an all-to-all of S ranks), which receives the sum so
far from the same rank of the replica before, adds its replica's pieces in order, and sends the sum on; from the last
replica it goes to the first one for the next turn. Every number is added to the same numbers in the same order as if
all pieces went to one owner, so that no bit depends on which of the two is done. Between replicas a rank sends

    4 bytes a number / S in a turn            instead of    2 or 4 bytes a number * (d - S) / d

of d data-parallel ranks in all: with nodes of 8 ranks and pieces in bf16, 3 to 4 times less. In the last turn that has
a piece the last replica sends the whole sum to all others, which would have been one exchange at the step's end.

A replica waits for the one before it, so that replicas run behind each other by what a part takes to go on: once in a
step, for from then on sums arrive while there is other work. Ranks of one place are asked in one order, and each waits
only for replicas before it in the same turn, or for the turn before: nobody waits for himself.

An excluded piece is passed over; while no piece has counted, nothing is sent, which all ranks know by themselves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from elastic3d.health.phases import Axis
from elastic3d.health.record import fingerprint
from elastic3d.owners import SenderTurn
from elastic3d.parallel.reduction.flat import Flat
from elastic3d.parallel.reduction.fold import Add, Fold, Stretch
from elastic3d.parallel.reduction.lanes import DEPTH, Lanes
from elastic3d.port import UNRECORDED, Progress

Going = Sequence[Any]
"""Works of torch's that are under way in one memory."""

_PASSED, _SPREAD = 98, 99


class Passing:
    """What goes between the ranks of one place in all replicas. group: of these ranks, in the order of replicas."""

    def __init__(self, group: dist.ProcessGroup, progress: Progress = UNRECORDED) -> None:
        self._group, self._progress = group, progress
        self.replica, self.replicas = group.rank(), group.size()
        self._to_spread: deque[tuple[torch.Tensor, Going]] = deque()
        self._spreading: list[Any] = []

    @property
    def last(self) -> bool:
        """Whether the last pieces of a turn are this replica's."""
        return self.replica == self.replicas - 1

    def own(self, turn: SenderTurn, shards: int) -> SenderTurn:
        """Return the part of a turn of all ranks that the ranks of this replica have."""
        return SenderTurn.of_all(0, shards, first=turn.first + self.replica * shards)

    def receive(self, part: torch.Tensor, going: Going, *, begun: bool) -> None:
        """Wait for the sum so far, if it has begun, when what was sent of that memory before has gone."""
        mark = fingerprint(_PASSED, part.numel())
        # All replicas count one operation for a part and a turn, also where nothing is to arrive.
        number = self._progress.enter(Axis.REPLICA, mark)
        if begun and self.replica:
            _wait(going)
            going = (self._from_before(part),)
        _wait(going)
        self._progress.leave(Axis.REPLICA, number)

    def send(self, part: torch.Tensor, *, again: bool) -> Going:
        """Send the sum so far to the next replica; return what is under way. again: there is another turn of it.

        The first replica asks for what the last one makes of it at once: with several stages on a rank the next turn's
        parts may come in another order than this one's, and a backend may know what arrives by its order alone. It
        cannot arrive before what is sent here has gone, for it is made of that.
        """
        target = (self.replica + 1) % self.replicas
        sent = dist.isend(part.view(torch.uint8), group=self._group, group_dst=target)
        return (sent, self._from_before(part)) if again and not self.replica else (sent,)

    def await_first(self, part: torch.Tensor) -> Going:
        """Return what is under way of a sum that begins behind the first replica, on that."""
        return () if self.replica else (self._from_before(part),)

    def _from_before(self, part: torch.Tensor) -> Any:
        source = (self.replica - 1) % self.replicas
        return dist.irecv(part.view(torch.uint8), group=self._group, group_src=source)

    def spread(self, part: torch.Tensor, going: Going) -> None:
        """Have the last replica's sum sent to all; soon, when what this replica has sent of it has gone."""
        self._to_spread.append((part, going))
        if len(self._to_spread) > DEPTH:
            self._spread()

    def _spread(self) -> None:
        part, going = self._to_spread.popleft()
        _wait(going)
        source = self.replicas - 1
        self._spreading.append(
            dist.broadcast(part.view(torch.uint8), group=self._group, group_src=source, async_op=True)
        )

    def settle(self) -> None:
        """Wait for all sums that are being sent to all."""
        if not self._to_spread and not self._spreading:
            return
        number = self._progress.enter(Axis.REPLICA, fingerprint(_SPREAD))
        while self._to_spread:
            self._spread()
        _wait(self._spreading)
        self._spreading.clear()
        self._progress.leave(Axis.REPLICA, number)


class PassedFold(Fold):
    """One unit's sum, of which every replica has a turn. group: of the ranks of this replica, as many as shards."""

    def __init__(
        self,
        flat: Flat,
        lanes: Lanes,
        group: dist.ProcessGroup,
        add: Add,
        passing: Passing,
        *,
        wire: Callable[[Flat], torch.dtype],
    ) -> None:
        super().__init__(flat, lanes, group, add, wire=wire)
        self._passing = passing
        self._going: dict[int, Going] = {}

    def _take(self, stretch: Stretch, turn: SenderTurn, rows: torch.Tensor) -> None:
        """Add this replica's rows of a turn to what those before it have added up, and send that on."""
        passing, shards, pieces = self._passing, self.flat.shards, self.pieces
        assert pieces is not None
        first = turn.first - passing.replica * shards
        if first >= pieces:
            return
        begun, ends = self._any(turn.first), first + passing.replicas * shards >= pieces
        part = self._sum[stretch.at : stretch.at + stretch.mine]
        passing.receive(part, self._going.pop(stretch.at, ()), begun=begun)
        if len(rows):
            self._add(part, rows, not begun)
        going: Going = ()
        if (begun or len(rows)) and not (ends and passing.last):
            going = passing.send(part, again=not ends)
        elif not ends and self._any(first + passing.replicas * shards):
            going = passing.await_first(part)
        stretch.empty = not self._any(pieces)
        if not ends:
            self._going[stretch.at] = going
        elif not stretch.empty:
            passing.spread(part, going)

    def _any(self, stop: int) -> bool:
        """Return whether any piece below that number counts."""
        assert self.pieces is not None
        below = min(stop, self.pieces)
        return below > sum(hole < below for hole in self.holes)


def _wait(going: Going) -> None:
    for work in going:
        if work is not None:
            work.wait()

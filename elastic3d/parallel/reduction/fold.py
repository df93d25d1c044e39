"""The running sum of one unit's gradients: pieces come from all ranks in rounds and are added in order.

A unit's vector is `shards` chunks of equal length; each chunk is cut into `ways` parts, and part p of chunk s is summed
by rank s * ways + p of the group. With one way the group's ranks are the shards themselves, and the sum is the shard's
gradient. With more (HSDP) the sum is spread over all replicas, and `gather` brings a chunk's parts to whoever holds the
shard.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from elastic3d.parallel.reduction.flat import Flat, intercept
from elastic3d.parallel.reduction.lanes import Lanes


class Fold:
    """One unit's sum. group: None where nobody shares it. pieces: how many count in this step, None for all.

    wire: dtype that pieces are sent in, None for that of the sum. Piece i of round r is number r * ranks + i; those
    from `pieces` on only fill the last round, and are dropped: multiplied by zero, a NaN would stay.
    """

    def __init__(
        self,
        flat: Flat,
        lanes: Lanes,
        group: dist.ProcessGroup | None,
        *,
        ways: int = 1,
        wire: torch.dtype | None = None,
    ) -> None:
        self.flat = flat
        self._lanes, self._group, self._ways, self._wire = lanes, group, ways, wire
        self.pieces: int | None = None
        self._ranks = group.size() if group else 1
        assert self._ranks == flat.shards * ways
        long = -(-flat.chunk // ways)
        self._parts = [max(0, min(long, flat.chunk - long * way)) for way in range(ways)]
        self._mine = self._parts[(group.rank() if group else 0) % ways]
        self._sum = torch.empty(0)
        self._whole = torch.empty(0)
        self._round, self._open, self._empty = 0, False, True
        intercept(flat.group, self._backward_ended)

    def begin(self, round_: int) -> None:
        """Expect the pieces of one round; rounds of a step come in order."""
        self._round, self._open = round_, True

    def rest(self) -> None:
        """Leave the next backward pass's gradients where they are, for a later round to take along."""
        self._open = False

    def chunk(self) -> torch.Tensor | None:
        """Return the sum of this rank's chunk, and begin a new one with the next round; None without any round.

        A collective where there are several ways. What is returned is overwritten by the next step's.
        """
        if self._empty:
            return None
        self._empty = True
        return self._sum if self._ways == 1 else self._gather()

    def _backward_ended(self) -> bool:
        if not self.flat.chunk:
            return False
        if not self._open:
            self.flat.look()
            return False
        self._open = False
        lane = self._lanes.next()
        out = lane.outgoing(self.flat.shards * self.flat.chunk, self._wire or self.flat.dtype, self.flat.device)
        self.flat.take(out)
        round_ = self._round
        if self._group is None:
            self._add(out.unsqueeze(0), round_)
        else:
            splits = self._parts * self.flat.shards
            lane.exchange(out, splits, self._mine, self._group, lambda pieces: self._add(pieces, round_))
        return True

    def _add(self, pieces: torch.Tensor, round_: int) -> None:
        """Add a round's pieces in the order of their ranks; the sum begins with the first piece, not with zero."""
        if self._sum.numel() != self._mine:
            self._sum = torch.empty(self._mine, dtype=self.flat.dtype, device=pieces.device)
        first = round_ * self._ranks
        for number, piece in enumerate(pieces, start=first):
            if self.pieces is not None and number >= self.pieces:
                return
            if self._empty:
                self._sum.copy_(piece)
                self._empty = False
            else:
                self._sum.add_(piece)

    def _gather(self) -> torch.Tensor:
        """Send this part to every rank that holds its chunk, and receive all parts of this rank's own."""
        assert self._group is not None
        rank, shards = self._group.rank(), self.flat.shards
        if self._whole.numel() != self.flat.chunk:
            self._whole = torch.empty(self.flat.chunk, dtype=self._sum.dtype, device=self._sum.device)
        item = self._sum.dtype.itemsize
        sent = [self._mine * item if other % shards == rank // self._ways else 0 for other in range(self._ranks)]
        received = [0] * self._ranks
        for way, part in enumerate(self._parts):
            received[rank % shards * self._ways + way] = part * item
        dist.all_to_all_single(
            self._whole.view(torch.uint8),
            self._sum.repeat(self._ways).view(torch.uint8),
            received,
            sent,
            group=self._group,
        )
        return self._whole

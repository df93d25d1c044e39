"""The running sum of one unit's gradients: pieces come from all ranks in rounds and are added in order.

A unit's vector is `shards` chunks of equal length; each chunk is cut into `ways` parts, and part p of chunk s is summed
by rank s * ways + p of the group. With one way the group's ranks are the shards themselves, and the sum is the shard's
gradient. With more (HSDP) the sum is spread over all replicas, and `chunk` brings a chunk's parts to whoever holds the
shard. A unit whose vector is larger than a lane's buffer goes in stretches: the same numbers of every chunk, each
stretch exchanged and cut into parts for itself. Every number is added up alone, so that no cut shows in the bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from elastic3d.errors import ModelError
from elastic3d.health.phases import Axis
from elastic3d.health.record import fingerprint
from elastic3d.owners import SenderTurn
from elastic3d.parallel.reduction.flat import Flat, intercept
from elastic3d.parallel.reduction.fold_sample import FoldSample
from elastic3d.parallel.reduction.lanes import Lane, Lanes
from elastic3d.parallel.reduction.whole_passes import INSTEAD

Add = Callable[[torch.Tensor, torch.Tensor, bool], None]
"""Adds rows to a sum in their order, as `elastic3d.devices.ComputeDevice.add_rows`."""

Seen = Callable[[int, Sequence[torch.Tensor]], None]
"""Looks at (round, the unit's whole gradients) before they are sent."""

Measured = Callable[[int, Sequence[str], Sequence[torch.Tensor]], None]
"""Takes (number of a piece that counts, names, the unit's whole gradients) before they are sent."""


@dataclass(slots=True, kw_only=True)
class SumStretch:
    """The numbers [start, stop) of every chunk. parts: how many each way has; mine, at: this rank's, in its sum."""

    start: int
    stop: int
    parts: tuple[int, ...]
    mine: int
    at: int
    empty: bool = True


class Fold:
    """One unit's sum. group: None where nobody shares it. pieces: how many count in this step, None for all.

    holes: pieces below that number which do not count either, and are dropped likewise. sample: keeps what is added
    to a part of the sum, None in most steps.

    wire: returns the dtype that pieces are sent in, known from the first forward pass on; by default that of the sum.
    rounds: it need not hold them exactly. Pieces are numbered in the order of rounds, and in a round in that of its
    senders, which are mostly all ranks; those from `pieces` on only fill the last round, and are dropped: multiplied by
    zero, a NaN would stay. watch: looks at gradients before they are
    sent, None in most steps. measure: takes the gradients of pieces that count, None where nobody measures them.

    FSDP ends a unit's backward pass once for each run of its module. Which run is the last it does not say, and ranks
    have to send in one order: gradients that come after a piece was sent are refused with ModelError. So is, where it
    `compares_uses`, a unit whose output some micro-batches of a step use and others drop: its pass ends at another
    place among those of other units then.
    """

    def __init__(
        self,
        flat: Flat,
        lanes: Lanes,
        group: dist.ProcessGroup | None,
        add: Add,
        *,
        ways: int = 1,
        wire: Callable[[Flat], torch.dtype] = lambda flat: flat.dtype,
        rounds: bool = False,
    ) -> None:
        self.flat = flat
        self.compares_uses = False
        self._reached: bool | None = None
        self._lanes, self._group, self._add, self._ways = lanes, group, add, ways
        self._wire, self._rounds = wire, rounds
        self.pieces: int | None = None
        self.holes: frozenset[int] = frozenset()
        self.watch: Seen | None = None
        self.measure: Measured | None = None
        self.sample: FoldSample | None = None
        self._rank = group.rank() if group else 0
        self._ranks = group.size() if group else 1
        assert self._ranks == flat.shards * ways
        self._stretches: list[SumStretch] = []
        self._sum = torch.empty(0)
        self._whole = torch.empty(0)
        self._turn = SenderTurn(first=0, senders=())
        self._round, self._open, self._sent, self._part = 0, False, False, False
        self.sent_at = 0
        intercept(flat.group, self._backward_ended)

    def begin_step(self) -> None:
        """Expect pieces of another step."""
        self._reached = None
        self.rest()

    def begin(self, round_: int, turn: SenderTurn) -> None:
        """Expect the pieces of a turn, which is this rank's so many-th; turns of a step come in order."""
        self._round, self._turn, self._open, self._sent, self._part = round_, turn, True, False, False

    def begin_chunk(self) -> None:
        """Expect the gradients of a chunk, which another one of the same piece follows."""
        self._open, self._sent, self._part = False, False, True

    def note(self, turn: SenderTurn | None) -> None:
        """Have it noted which parameters get a gradient in a turn, unless its piece does not count; None for no turn.

        That matters where there are holes: what only fills up a turn may be like one of them.
        """
        own = turn.first + turn.senders.index(self._rank) if turn is not None else -1
        self.flat.notes = not self.holes or (own >= 0 and self._counts(own))

    def attend(self, turn: SenderTurn) -> None:
        """Take part in a turn in which this rank has no piece, after a first one in which it had."""
        wire = self._wire(self.flat)
        for stretch in self._stretches:
            self._exchange(stretch, turn, torch.empty(0, dtype=wire, device=self.flat.device), self._lanes.next())

    @property
    def exchanges(self) -> int:
        """How many there are in a turn; known after the first one."""
        return len(self._stretches)

    def _counts(self, piece: int) -> bool:
        return piece not in self.holes and (self.pieces is None or piece < self.pieces)

    def rest(self) -> None:
        """Leave the next backward pass's gradients where they are, for a later round to take along."""
        self._open = self._sent = self._part = False

    def drop(self) -> None:
        """Forget the sum of the rounds so far; nothing may be under way."""
        self.flat.drop()
        for stretch in self._stretches:
            stretch.empty = True

    def release(self) -> None:
        """Let go of the sum's memory, which the next piece makes anew."""
        self._stretches = []
        self._sum = self._whole = torch.empty(0)

    @property
    def total(self) -> torch.Tensor:
        """What this rank has added up, until the next step's first piece."""
        return self._sum

    @property
    def counted(self) -> int:
        """How many pieces of the step are added up; to be asked where not all are."""
        assert self.pieces is not None
        return self.pieces - sum(hole < self.pieces for hole in self.holes)

    def chunk(self) -> torch.Tensor | None:
        """Return the sum of this rank's chunk, and begin a new one with the next round; None without any round.

        A collective where there are several ways. What is returned is overwritten by the next step's.
        """
        if all(stretch.empty for stretch in self._stretches):
            return None
        self.drop()
        return self._sum if self._ways == 1 else self._gather()

    def _backward_ended(self) -> bool:
        flat = self.flat
        if not flat.chunk:
            return False
        if self.compares_uses and (self._part or self._open):
            self._compare_uses()
        if self._part:
            self._part, self._sent = False, True
            self.flat.add_chunk()
            return True
        if not self._open:
            if self._sent and flat.holds_any():
                raise ModelError(
                    f"module {flat.unit!r} runs several times in one forward pass, and its gradients are sent where "
                    "its backward pass first ends; leave blocks= out, which shards and reduces the model as one"
                )
            flat.look()
            return False
        self._open, self._sent = False, True
        wire, round_, turn = self._wire(flat), self._round, self._turn
        self.sent_at = self._lanes.used
        if not self._stretches:
            width = self._lanes.bound // (flat.shards * wire.itemsize)
            self._stretches = stretches(flat.chunk, width=width, ways=self._ways, way=self._rank % self._ways)
            self._sum = torch.empty(sum(s.mine for s in self._stretches), dtype=flat.dtype, device=flat.device)
        gradients = flat.take(wire, rounds=self._rounds)
        if self.watch is not None:
            self.watch(round_, gradients)
        if self.measure is not None:
            piece = turn.first + turn.senders.index(self._rank)
            if self._counts(piece):
                self.measure(piece, flat.names, gradients)
        for stretch in self._stretches:
            lane = self._lanes.next()
            out = lane.outgoing(flat.shards * (stretch.stop - stretch.start), wire, flat.device)
            flat.fill(out, gradients, stretch.start, stretch.stop)
            if self._group is None:
                self._arrived(stretch, turn, out.unsqueeze(0))
            else:
                self._exchange(stretch, turn, out, lane)
        return True

    def _compare_uses(self) -> None:
        reached = self.flat.reached
        if self._reached not in (None, reached):
            raise ModelError(
                f"what module {self.flat.unit!r} returns is used for some micro-batches of a step and not for others, "
                "and ranks would send gradients in other orders. Trying again does not help: use its output for every "
                f"micro-batch (times 0 where it is to be left out), {INSTEAD}"
            )
        self._reached = reached

    def _exchange(self, stretch: SumStretch, turn: SenderTurn, out: torch.Tensor, lane: Lane) -> None:
        assert self._group is not None
        lane.exchange(
            out,
            stretch.parts * self.flat.shards,
            stretch.mine,
            self._group,
            functools.partial(self._arrived, stretch, turn),
            turn.senders,
            self._lanes.transit,
        )

    def _arrived(self, stretch: SumStretch, turn: SenderTurn, pieces: torch.Tensor) -> None:
        """Take those of a turn's pieces that count."""
        first = turn.first
        if self.pieces is not None:
            pieces = pieces[: max(0, self.pieces - first)]
        if any(first <= hole < first + len(pieces) for hole in self.holes):
            pieces = pieces[[row for row in range(len(pieces)) if first + row not in self.holes]]
        self._take(stretch, turn, pieces)

    def _take(self, stretch: SumStretch, turn: SenderTurn, rows: torch.Tensor) -> None:
        """Add a turn's pieces in the order of their ranks; the sum begins with the first piece, not with zero."""
        if len(rows):
            if self.sample is not None:
                parts = [(one.at, one.mine) for one in self._stretches]
                self.sample.added(parts, stretch.at, rows, self.counted)
            self._add(self._sum[stretch.at : stretch.at + stretch.mine], rows, stretch.empty)
            stretch.empty = False

    def _gather(self) -> torch.Tensor:
        """Send this rank's parts to every rank that holds their chunk, and receive all parts of this rank's own."""
        assert self._group is not None
        if self._whole.numel() != self.flat.chunk:
            self._whole = torch.empty(self.flat.chunk, dtype=self._sum.dtype, device=self._sum.device)
        shards, item = self.flat.shards, self._sum.dtype.itemsize
        holders = [other % shards == self._rank // self._ways for other in range(self._ranks)]
        progress, transit = self._lanes.progress, self._lanes.transit
        for stretch in self._stretches:
            received = [0] * self._ranks
            for way, part in enumerate(stretch.parts):
                received[self._rank % shards * self._ways + way] = part * item
            into = self._whole[stretch.start : stretch.stop].view(torch.uint8)
            out = self._sum[stretch.at : stretch.at + stretch.mine].repeat(self._ways).view(torch.uint8)
            sent = [stretch.mine * item if holds else 0 for holds in holders]
            exchange = transit.sends(out, sent) if transit is not None else 0
            number = progress.enter(Axis.DP, fingerprint(item, stretch.start, stretch.stop))
            dist.all_to_all_single(into, out, received, sent, group=self._group)
            progress.leave(Axis.DP, number)
            if transit is not None:
                transit.arrived(exchange, into, received)
        return self._whole


def stretches(chunk: int, *, width: int, ways: int, way: int) -> list[SumStretch]:
    """Return the fewest stretches of at most `width` numbers, at least one, that cover a chunk, alike in length."""
    number = -(-chunk // max(1, width))
    long = -(-chunk // number)
    made, at = [], 0
    for start in range(0, chunk, long):
        stop = min(chunk, start + long)
        part = -(-(stop - start) // ways)
        parts = tuple(max(0, min(part, stop - start - part * one)) for one in range(ways))
        made.append(SumStretch(start=start, stop=stop, parts=parts, mine=parts[way], at=at))
        at += parts[way]
    return made

"""Sums of which fewer bytes travel: in 16 bits, or as factors of low rank between replicas (PowerSGD).

No promise of equal bits. What travels where, for `Layout(replicas=R)` with a replica per node:

- "bf16", "fp16": pieces of a reduce-scatter, and what crosses between replicas, have 2 bytes a number. Whoever owns a
  shard adds the pieces in the reduce dtype, so each is rounded once, not at every hop as in a ring. fp16 loses what is
  below 6e-8 and above 65504: it wants a loss scale, bf16 does not.
- "powersgd": within a replica nothing is rounded; between replicas a matrix (the shard's rows of a parameter) travels
  as two factors of RANK columns. What a step leaves out is kept and added to the next one's gradient (error feedback).
  That and the factors are memory of this process: they begin anew in each generation, whose first START steps
  exchange whole gradients.

ZeRO-1 adds up locally and sends once a step, ZeRO-2 and 3 send each round; replicas meet once a step in any case.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.fsdp import FSDPModule

from elastic3d.health.phases import Axis
from elastic3d.health.record import fingerprint
from elastic3d.owners import SenderTurn
from elastic3d.parallel.reduction.flat import Flat
from elastic3d.parallel.reduction.fold import Add, Fold
from elastic3d.parallel.reduction.lanes import Lanes
from elastic3d.parallel.reduction.ordered import forget, prepare
from elastic3d.parallel.reduction.units import flats_of, reduce_now
from elastic3d.port import UNRECORDED, Progress

WIRES = {"bf16": torch.bfloat16, "fp16": torch.float16}
POWERSGD = "powersgd"

RANK = 4
START = 2
EPSILON = 1e-8
"""Keeps the columns of a gradient that is all zeros from being divided by zero."""


class Crossing(Protocol):
    """How replicas bring the sums of one shard together."""

    def sum(self, flat: Flat, number: int, chunk: torch.Tensor) -> torch.Tensor:
        """Return the sum over replicas of the chunk of one unit, the `number`-th of the rank; may use its memory."""
        ...


class Rounded:
    """An all-to-all and an all-gather of parts in 16 bits, added up in the chunk's own dtype."""

    def __init__(self, group: dist.ProcessGroup, wire: torch.dtype, progress: Progress = UNRECORDED) -> None:
        self._group, self._wire, self._progress = group, wire, progress

    def sum(self, flat: Flat, number: int, chunk: torch.Tensor) -> torch.Tensor:
        """Return the sum; every replica gets the same bits."""
        ranks = self._group.size()
        part = -(-chunk.numel() // ranks)
        sent = torch.zeros(ranks * part, dtype=self._wire, device=chunk.device)
        sent[: chunk.numel()] = chunk
        pieces = torch.empty_like(sent)
        # Both operations count as one.
        entered = self._progress.enter(Axis.REPLICA, fingerprint(number, sent.numel()))
        dist.all_to_all_single(pieces.view(torch.uint8), sent.view(torch.uint8), group=self._group)
        total = torch.zeros(part, dtype=chunk.dtype, device=chunk.device)
        for piece in pieces.view(ranks, part):
            total.add_(piece)
        mine = total.to(self._wire)
        dist.all_gather_into_tensor(sent.view(torch.uint8), mine.view(torch.uint8), group=self._group)
        self._progress.leave(Axis.REPLICA, entered)
        return chunk.copy_(sent[: chunk.numel()])


@dataclass(frozen=True, slots=True)
class _Bucket:
    """What torch's hook reads of DDP's bucket of gradients."""

    number: int
    chunk: torch.Tensor
    matrices: list[torch.Tensor]
    last: bool

    def index(self) -> int:
        return self.number

    def buffer(self) -> torch.Tensor:
        return self.chunk

    def gradients(self) -> list[torch.Tensor]:
        return self.matrices

    def is_last(self) -> bool:
        return self.last


class LowRank:
    """torch's PowerSGD hook over the replicas. units: how many take part in a step."""

    def __init__(self, group: dist.ProcessGroup, units: int, progress: Progress = UNRECORDED) -> None:
        self._ranks, self._units, self._progress = group.size(), units, progress
        self._state = PowerSGDState(
            group, matrix_approximation_rank=RANK, start_powerSGD_iter=START, orthogonalization_epsilon=EPSILON
        )

    def sum(self, flat: Flat, number: int, chunk: torch.Tensor) -> torch.Tensor:
        """Return the approximate sum; the hook's mean times the number of replicas."""
        rows = [rows for rows in flat.split(chunk) if rows.numel()]
        bucket = _Bucket(number, chunk, rows, last=number == self._units - 1)
        entered = self._progress.enter(Axis.REPLICA, fingerprint(number, chunk.numel()))
        mean: torch.Tensor = powerSGD_hook(self._state, bucket).wait()
        self._progress.leave(Axis.REPLICA, entered)
        return mean.mul_(self._ranks)


class Compressed:
    """The compressed reduction of one stage. shard, replica: groups, None if this rank is alone in them.

    add: adds rows in order, as a device does.
    """

    scales_fillers = True

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[FSDPModule],
        *,
        add: Add,
        compress: str,
        shard: dist.ProcessGroup | None,
        replica: dist.ProcessGroup | None,
        zero: int,
        progress: Progress = UNRECORDED,
    ) -> None:
        self._units, self._zero = units, zero
        self._lanes = Lanes(progress, Axis.DP if replica is None else Axis.SHARD)
        self._ranks = shard.size() if shard else 1
        wire = WIRES.get(compress)
        self._folds = [
            Fold(flat, self._lanes, shard, add, wire=lambda flat: wire or flat.dtype, rounds=True)
            for flat in flats_of(model, units)
        ]
        self._wire, self._replica, self._progress = wire, replica, progress
        self._crossing = self._cross()

    @property
    def _trained(self) -> list[Fold]:
        return [fold for fold in self._folds if fold.flat.chunk]

    def _cross(self) -> Crossing | None:
        if self._replica is None:
            return None
        if self._wire is not None:
            return Rounded(self._replica, self._wire, self._progress)
        return LowRank(self._replica, len(self._trained), self._progress)

    def begin_step(self, micro_batches: int, excluded: Collection[int] = (), turns: Sequence[SenderTurn] = ()) -> None:
        """Take up what is trained now, with factors that begin anew: nothing else depends on the step, and all send."""
        changed = [fold for fold in self._folds if fold.flat.follow()]
        for fold in changed:
            fold.release()
        if changed:
            self._crossing = self._cross()

    def begin(self, round_: int, *, last: bool) -> None:
        """Have this round's gradients sent, or left to add up."""
        reduces = last or self._zero != 1
        for fold in self._folds:
            fold.begin(round_, SenderTurn.of_all(round_, self._ranks)) if reduces else fold.rest()
        prepare(self._units, last=last, zero=self._zero, reduces=reduces)

    def hold(self) -> None:
        """Leave the next pass's gradients where they are, and parameters whole for the pass over the weights."""
        for fold in self._folds:
            fold.rest()
        prepare(self._units, last=False, zero=2, reduces=False)

    def reduce(self, round_: int, *, last: bool) -> None:
        """Send, or leave to add up, what the pass over the weights has left."""
        self.begin(round_, last=last)
        reduce_now(self._units)

    def end_passes(self) -> None:
        """Do nothing: all ranks send in every round."""

    def finish(self) -> None:
        """Bring the replicas' sums together and make them the gradients."""
        self._lanes.settle()
        for number, fold in enumerate(self._trained):
            chunk = fold.chunk()
            assert chunk is not None
            fold.flat.put(self._crossing.sum(fold.flat, number, chunk) if self._crossing else chunk)

    def present(self) -> set[str]:
        """Return the names of the parameters that got a gradient here, and forget them."""
        return forget([fold.flat for fold in self._folds])

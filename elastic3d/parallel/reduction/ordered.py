"""Gradients summed in micro-batch order, whatever the number of replicas and the ZeRO stage.

Micro-batch j belongs to dp rank j % dp, round j // dp, so rank order within a round, and rounds in turn, is micro-batch
order. In each round every rank sends each owner its piece of the gradient (an all-to-all: the bytes of one
reduce-scatter), and the owner adds the pieces in order onto a running sum, which becomes the gradient at the step's
end. FSDP itself reduces nothing: a unit's gradients are taken where its backward pass ends. What makes the sum that of
plain autograd:

- A parameter that got no gradient in a micro-batch contributes -0.0, so that the places of the others do not move, and
  sums begin with the first piece. A parameter that got none in the whole step must end with `grad` None: `present`
  tells which did here.
- Pieces of micro-batches that only fill up the last round, or are excluded, are dropped by their receiver.
- A piece is sent in the dtype that it was computed in and added in that of the sum: with `precision="bf16"` half the
  bytes and the same bits, for every bf16 is an fp32. Gradients that added up on their rank are fp32, and stay so.
- Every micro-batch reduces; without that torch would add up locally, in an order that depends on dp. So ZeRO-1 is here
  what ZeRO-2 is: traffic each round, and whole gradients live for one unit's backward pass, not for the step.

With leaves of g micro-batches the sum is a tree of two levels that no layout changes. Leaf l, the micro-batches from
g * l on, belongs to dp rank l % dp, which adds it up in order, as autograd does for one replica; the leaves are then
sent and added like micro-batches above, once in g of them. Whole gradients live for a leaf, in the dtype of the sum,
which is also what is sent: against bf16 pieces a leaf of 2 sends as much, and of g a g/2-th.

Ranks may have unequal shares of the leaves (`elastic3d.owners`). One that has none in a turn sends nothing, but takes
part in its exchanges for the sake of the sums that it owns: as soon as its pass before is made, so that others need not
wait for the next one. Lanes are then as many as a turn has exchanges: a rank that has sent all of a turn goes on with
its next pass while a slower one is still at that turn. Each step begins with a turn of all ranks, in which they
learn in what order units are sent.

With replicas (HSDP) of at least LEAST ranks the sum of a shard goes from replica to replica (`passed`). With smaller
ones, in audited steps and with unequal shares it is spread over the replicas' holders of it: rounds cost what they cost
without replicas, and one exchange at the step's end brings each holder all parts. With G bytes of gradients as they are
sent (a unit's or all), F bytes of them as they are added up, d dp ranks in R replicas of S = d / R, each a node, and r
rounds of leaves, each rank sends in a step

                        to ranks of its node     to other nodes
    passed on           r * G * (S - 1) / S      r * F / S and, on average, as much once more of the last replica
    spread              r * G * (S - 1) / d      r * G * (d - S) / d + at most F / S

where the backend's own HSDP (`fast`) sends F * (S - 1) / S within the node, once with ZeRO-1 and else r times, and 2 *
F / S * (R - 1) / R across. Sums in a fixed order cannot be formed per node first and then added: addition is not
associative. What is added up before, leaves, has to be said beforehand.

Where sequences are cut into chunks, the gradients of a micro-batch are themselves sums over its chunks, which the ranks
that share them make first (`chunks`).
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from elastic3d.health.phases import Axis
from elastic3d.owners import SenderTurn
from elastic3d.parallel.leaf_squares import LeafSquares
from elastic3d.parallel.reduction.chunks import MakeFlat
from elastic3d.parallel.reduction.flat import Flat
from elastic3d.parallel.reduction.fold import Add, Fold
from elastic3d.parallel.reduction.gathers import Gathers
from elastic3d.parallel.reduction.lanes import Lanes
from elastic3d.parallel.reduction.passed import PassedFold, Passing
from elastic3d.parallel.reduction.transit import Transit
from elastic3d.parallel.reduction.units import flats_of, reduce_now, settle_each
from elastic3d.parallel.witness import Witness
from elastic3d.port import UNRECORDED, Progress


class Ordered:
    """The ordered reduction of one stage. units: its root last. group: of all dp ranks, None for one.

    add: adds rows in order, as a device does.
    splits: the schedule computes gradients of inputs and of weights apart, so that they add up before they are sent.
    leaf: how many micro-batches in a row a rank adds up before it sends them. chunked: makes the units' vectors where
    sequences are cut into chunks, None where they are not.
    shard, replica: groups of the ranks of this replica, and of this rank's place in each of them, where sums are passed
    on; None where they are not.
    """

    scales_fillers = False

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[FSDPModule],
        *,
        group: dist.ProcessGroup | None,
        add: Add,
        replicas: int,
        zero: int,
        splits: bool,
        leaf: int = 1,
        chunked: MakeFlat | None = None,
        shard: dist.ProcessGroup | None = None,
        replica: dist.ProcessGroup | None = None,
        progress: Progress = UNRECORDED,
    ) -> None:
        self._units, self._zero, self._leaf, self._lanes = units, zero, leaf, Lanes(progress)
        self._chunked = chunked is not None
        self._rank, self._ranks = (group.rank(), group.size()) if group else (0, 1)
        self._turns: Sequence[SenderTurn] = ()
        self._own: list[int] = []
        self._taken = 0
        wire = _summed if splits or leaf > 1 or chunked else _computed
        flats = flats_of(model, units, chunked or Flat)
        self._folds = [Fold(flat, self._lanes, group, add, ways=replicas, wire=wire) for flat in flats]
        self._passing: Passing | None = None
        self._passed: list[PassedFold] = []
        if shard is not None and replica is not None:
            self._passing = passing = Passing(replica, progress)
            self._passed = [PassedFold(flat, self._lanes, shard, add, passing, wire=wire) for flat in flats]
        if leaf > 1:
            settle_each(units, flats)
        self._used: Sequence[Fold] = self._folds
        for fold in (*self._folds, *self._passed):
            # Where gradients of weights come from passes of their own, no output tells of them.
            fold.compares_uses = group is not None and not splits
        self.gathers = [Gathers(flat) for flat in flats]

    def begin_step(self, micro_batches: int, excluded: Collection[int] = (), turns: Sequence[SenderTurn] = ()) -> None:
        """Tell every fold which pieces count in the step; what is under way still belongs to the pass before."""
        self._settle()
        changed = {id(fold.flat) for fold in self._folds if fold.flat.follow()}
        for fold in (*self._folds, *self._passed):
            if id(fold.flat) in changed:
                fold.release()
        self._turns, self._taken = turns, 0
        self._own = [number for number, turn in enumerate(turns) if self._rank in turn.senders]
        passes = bool(self._passed) and not turns and self._lanes.transit is None
        self._used = self._passed if passes else self._folds
        self._lanes.meet_on(Axis.SHARD if passes else Axis.DP)
        if turns:
            self._lanes.deepen(sum(fold.exchanges for fold in self._folds))
        for fold in self._folds if passes else self._passed:
            fold.release()
        for fold in (*self._folds, *self._passed):
            fold.begin_step()
            fold.pieces = micro_batches // self._leaf
            fold.holes = frozenset(number // self._leaf for number in excluded)

    def watch(self, witness: Witness | None, stage: int) -> None:
        """Have the gradients of every unit digested, or no longer. stage: whose they are."""
        for folds in (self._folds, self._passed):
            for index, fold in enumerate(folds):
                if witness is None:
                    fold.watch = None
                    continue
                # The root's gradients are complete last, those of blocks from the last one on.
                number = index if index == len(folds) - 1 else len(folds) - 2 - index
                fold.watch = functools.partial(_tell, witness, stage, number, fold.flat.name)

    def measure(self, squares: LeafSquares | None) -> None:
        """Have the gradients of every leaf measured, or no longer."""
        for fold in (*self._folds, *self._passed):
            fold.measure = None if squares is None else squares.add

    @property
    def folds(self) -> Sequence[Fold]:
        """The sums of all units, as they are where none is passed on, which it is not in a step that is looked at."""
        return self._folds

    def inspect(self, transit: Transit | None) -> None:
        """Have all that is exchanged looked at, or no longer; nothing may be under way."""
        self._settle()
        self._lanes.transit = transit
        for gathers in self.gathers:
            if transit is not None:
                gathers.begin()
            gathers.watching = transit is not None

    def drop(self) -> None:
        """Forget what the step has summed so far: its passes are made again."""
        self._settle()
        for fold in (*self._folds, *self._passed):
            fold.drop()

    def _settle(self) -> None:
        """Wait for everything under way, on its way within replicas first, and then between them."""
        self._lanes.settle()
        if self._passing is not None:
            self._passing.settle()

    def begin(self, round_: int, *, last: bool) -> None:
        """Tell every fold which piece comes next, or that a leaf is not complete with this round."""
        own, number = divmod(round_, self._leaf)
        complete = number == self._leaf - 1
        if self._turns:
            self._attend(self._own[own])
            self._taken, turn = self._own[own] + 1, self._turns[self._own[own]]
        else:
            turn = SenderTurn.of_all(own, self._ranks)
        if self._passing is not None and self._used is self._passed:
            turn = self._passing.own(turn, self._ranks // self._passing.replicas)
        for fold in self._used:
            if complete:
                fold.begin(own, turn)
            elif self._chunked:
                fold.begin_chunk()
            else:
                fold.rest()
            fold.note(turn)
        prepare(self._units, last=last, zero=self._zero, reduces=complete or self._chunked)

    def begin_chunk(self, round_: int) -> None:
        """Tell every fold that the gradients of a chunk come next, and others of the same micro-batch after them."""
        turn = SenderTurn.of_all(round_ // self._leaf, self._ranks)
        for fold in self._folds:
            fold.begin_chunk()
            fold.note(turn)
        prepare(self._units, last=False, zero=self._zero)

    def hold(self) -> None:
        """Leave the next pass's gradients where they are, and parameters whole for the pass over the weights."""
        for fold in self._used:
            fold.rest()
            fold.note(None)
        prepare(self._units, last=False, zero=2, reduces=False)

    def reduce(self, round_: int, *, last: bool) -> None:
        """Send what the pass over the weights has left, if a leaf is complete with it."""
        self.begin(round_, last=last)
        reduce_now(self._units)

    def end_passes(self) -> None:
        """Take part in the turns after this rank's last one."""
        self._attend(len(self._turns))

    def _attend(self, stop: int) -> None:
        """Take part in the turns before `stop` in which this rank has nothing to send."""
        for number in range(self._taken, stop):
            for fold in sorted(self._folds, key=lambda fold: fold.sent_at):
                fold.attend(self._turns[number])
        self._taken = max(self._taken, stop)

    def finish(self) -> None:
        """Make every fold's sum the gradients."""
        self._settle()
        for fold in self._used:
            chunk = fold.chunk()
            if chunk is not None:
                fold.flat.put(chunk)

    def present(self) -> set[str]:
        """Return the names of the parameters that got a gradient here, and forget them."""
        return forget([fold.flat for fold in self._folds])


def _tell(witness: Witness, stage: int, number: int, unit: str, turn: int, gradients: Sequence[torch.Tensor]) -> None:
    witness.gradients(turn, stage, number, unit, gradients)


def _summed(flat: Flat) -> torch.dtype:
    return flat.dtype


def _computed(flat: Flat) -> torch.dtype:
    return flat.computed


def prepare(units: Sequence[FSDPModule], *, last: bool, zero: int, reduces: bool = True) -> None:
    """Tell FSDP what the next backward pass is; parameters stay whole until the last, but for ZeRO-3."""
    units[-1].set_is_last_backward(last)
    for unit in units:
        unit.set_requires_gradient_sync(reduces, recurse=False)
        unit.set_reshard_after_backward(last or zero == 3, recurse=False)


def forget(flats: Sequence[Flat]) -> set[str]:
    """Return the names of the parameters that got a gradient, and forget them."""
    names: set[str] = set().union(*(flat.seen for flat in flats))
    for flat in flats:
        flat.seen.clear()
    return names

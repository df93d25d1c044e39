"""The backend's own sums, whose order depends on the layout."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import nn
from torch.distributed.fsdp import FSDPModule

from elastic3d.owners import SenderTurn
from elastic3d.parallel.reduction.flat import Flat, intercept
from elastic3d.parallel.reduction.ordered import forget, prepare
from elastic3d.parallel.reduction.units import flats_of, reduce_now


class Fast:
    """The backend's own reduce-scatter; and with replicas (HSDP) its all-reduce of the shards, once a step.

    ZeRO-2 and 3 reduce each round. ZeRO-1 keeps whole gradients and adds up locally, so that it reduces once a
    step. units: the root last.
    """

    scales_fillers = True

    def __init__(self, model: nn.Module, units: Sequence[FSDPModule], *, zero: int) -> None:
        self._units, self._zero = units, zero
        self._flats = flats_of(model, units)
        # Ranks that use different parameters would reduce unlike pieces: before torch 2.13 FSDP cannot be told to.
        knows = hasattr(units[-1], "set_reduce_scatter_unused_params")
        for flat in self._flats:
            _watch(flat, completes=not knows)
        for unit in units:
            # A sum, as the ordered reduction's; each loss is already divided by the number of micro-batches.
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
        if knows:
            units[-1].set_reduce_scatter_unused_params(True)

    def begin_step(self, micro_batches: int, excluded: Collection[int] = (), turns: Sequence[SenderTurn] = ()) -> None:
        """Take up what is trained now: the order of sums does not depend on their number, and all ranks send."""
        for flat in self._flats:
            flat.follow()

    def begin(self, round_: int, *, last: bool) -> None:
        """Turn FSDP's reduction on where this round has one."""
        prepare(self._units, last=last, zero=self._zero, reduces=last or self._zero != 1)
        for unit in self._units:
            unit.set_requires_all_reduce(last, recurse=False)

    def hold(self) -> None:
        """Turn FSDP's reduction off, and keep parameters whole for the pass over the weights."""
        prepare(self._units, last=False, zero=2, reduces=False)

    def reduce(self, round_: int, *, last: bool) -> None:
        """Reduce, where this round has a reduction, what the pass over the weights has left."""
        self.begin(round_, last=last)
        reduce_now(self._units)

    def end_passes(self) -> None:
        """Do nothing: all ranks send in every round."""

    def finish(self) -> None:
        """Do nothing: FSDP has put the sums into the gradients."""

    def present(self) -> set[str]:
        """Return the names of the parameters that got a gradient here, and forget them."""
        return forget(self._flats)


def _watch(flat: Flat, *, completes: bool) -> None:
    def look() -> bool:
        flat.look()
        if completes:
            flat.complete()
        return False

    intercept(flat.group, look)

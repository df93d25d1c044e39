"""What every way of reducing gradients does for the passes of a step."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from elastic3d.owners import SenderTurn


class Reduction(Protocol):
    """How the gradients of a step's micro-batches become the gradient of the step, for one stage of this rank."""

    scales_fillers: bool

    def begin_step(self, micro_batches: int, excluded: Collection[int] = (), turns: Sequence[SenderTurn] = ()) -> None:
        """Prepare for a step of this many micro-batches over all replicas; those numbered beyond do not count.

        excluded: numbers of others that do not count, whole leaves. turns: which ranks send in each; () if all do.
        """
        ...

    def begin(self, round_: int, *, last: bool) -> None:
        """Prepare for the backward pass of one round; last: no other follows in this step."""
        ...

    def hold(self) -> None:
        """Prepare for a backward pass that leaves gradients alone, or leaves them to `reduce`."""
        ...

    def reduce(self, round_: int, *, last: bool) -> None:
        """Reduce the gradients of one round, which a pass over the weights alone has left behind."""
        ...

    def end_passes(self) -> None:
        """Take part in what other ranks send after this rank's last pass of a step."""
        ...

    def finish(self) -> None:
        """Put the step's sums into the gradients."""
        ...

    def present(self) -> set[str]:
        """Return the names of the parameters that got a gradient on this rank in this step, and forget them.

        To be asked when all passes are over, before `finish` or after it.
        """
        ...

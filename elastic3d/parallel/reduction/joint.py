"""The reductions of all stages of a rank, for what concerns them together at a step's end."""

from __future__ import annotations

from collections.abc import Sequence

from elastic3d.parallel.reduction.protocol import Reduction


class Joint:
    """Several stages, each with a reduction of its own that its passes begin."""

    def __init__(self, reductions: Sequence[Reduction]) -> None:
        self._reductions = reductions

    def finish(self) -> None:
        """Put the step's sums into the gradients of every stage."""
        for reduction in self._reductions:
            reduction.finish()

    def present(self) -> set[str]:
        """Return the names of the parameters that got a gradient on this rank in this step, and forget them."""
        return set().union(*(reduction.present() for reduction in self._reductions))

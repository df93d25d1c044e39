"""The backend's own sums: fewer collectives, and an order that depends on the layout."""

from __future__ import annotations

from torch import nn
from torch.distributed.fsdp import FSDPModule


class Fast:
    """The backend's own reduce-scatter, once a step, after adding up locally; its order depends on the layout."""

    scales_fillers = True

    def __init__(self, model: nn.Module, units: list[FSDPModule], *, zero: int) -> None:
        self._model, self._root, self._zero = model, units[-1], zero
        for unit in units:
            # A sum, as the ordered reduction's; each loss is already divided by the number of micro-batches.
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
        if hasattr(self._root, "set_reduce_scatter_unused_params"):
            # Without it (before torch 2.13) ranks that use different parameters reduce unlike pieces.
            self._root.set_reduce_scatter_unused_params(True)

    def begin_step(self, micro_batches: int) -> None:
        """Do nothing: the order of sums does not depend on their number."""

    def begin(self, round_: int, *, last: bool) -> None:
        """Turn the reduction on for the last round only."""
        self._root.set_requires_gradient_sync(last)
        self._root.set_is_last_backward(last)
        self._root.set_reshard_after_backward(last or self._zero == 3)

    def finish(self) -> None:
        """Do nothing: FSDP has put the sums into the gradients."""

    def present(self) -> set[str]:
        """Return the names of the parameters that have a gradient."""
        return {name for name, parameter in self._model.named_parameters() if parameter.grad is not None}

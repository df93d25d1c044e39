"""Forward passes that a script makes itself, outside `run.backward`: those that cannot work are refused by name.

With pipeline stages each rank has only a part of the model. Without them the ranks gather parameters for each other, so
that a pass that only some of them make would wait for ever.

Whoever reads parameters between passes - the update, snapshots, averages - reads shards. So what a pass has gathered is
let go of at its end, also where FSDP would keep it for a backward pass: one that follows gathers it again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from elastic3d.errors import UsageError
from elastic3d.parallel.all_ranks import AllRanks
from elastic3d.parallel.reduction.units import reshard
from elastic3d.values import Layout

PATIENCE = 60.0
"""Seconds for which the ranks wait for each other before such a pass."""


class Outside:
    """Watches a model's forward passes. `inside()` surrounds those of `run.backward`. ranks: None for a single rank."""

    def __init__(self, model: nn.Module, layout: Layout, ranks: AllRanks | None) -> None:
        self._layout, self._ranks, self._inside = layout, ranks, False
        if ranks is not None:
            # It runs before FSDP's own hook, which gathers.
            model.register_forward_pre_hook(self._look, prepend=True)
        if isinstance(model, FSDPModule):
            # It runs after FSDP's own hook, and also where forward raised what the script then catches.
            model.register_forward_hook(self._let_go, always_call=True)

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Allow passes: all ranks make them."""
        self._inside = True
        try:
            yield
        finally:
            self._inside = False

    def meet(self, call: str) -> None:
        """Block until every rank has come to this call of the script; UsageError if one does not."""
        if self._ranks is not None:
            self._ranks.meet(call, patience=PATIENCE)

    def _look(self, module: nn.Module, args: Any) -> None:
        if self._inside:
            return
        if self._layout.pp > 1:
            raise UsageError(
                f"model(...) was called outside run.backward, and in this layout ({self._layout}) each rank has the "
                "layers of its own stage alone. Evaluate by run.evaluate, or from a checkpoint in another program "
                "(elastic3d ckpt export), or fix elastic3d.run(layout=Layout(pp=1)) and call it on every rank alike"
            )
        self.meet("model(...) outside run.backward")

    def _let_go(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self._inside:
            reshard(module)

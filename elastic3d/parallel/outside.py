"""Forward passes that a script makes itself, outside `run.backward`: those that cannot work are refused by name.

With pipeline stages each rank has only a part of the model. Without them the ranks gather parameters for each other, so
that a pass that only some of them make would wait for ever.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from elastic3d.errors import UsageError
from elastic3d.parallel.all_ranks import AllRanks
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

"""Forward passes that a script makes itself, outside `run.backward`: what cannot work is refused by name.

With pipeline stages each rank has a part of the model alone. Without, the ranks gather parameters for each other, so
that a pass that some of them make and others do not would wait for ever.
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
"""Seconds the ranks wait for each other before such a pass."""


class Outside:
    """Looks on at a model's forward passes. `inside()` surrounds those of `run.backward`. ranks: None for one alone."""

    def __init__(self, model: nn.Module, layout: Layout, ranks: AllRanks | None) -> None:
        self._layout, self._ranks, self._inside = layout, ranks, False
        if ranks is not None:
            # Before FSDP's own hook, which gathers.
            model.register_forward_pre_hook(self._look, prepend=True)

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Let passes through: all ranks make them."""
        self._inside = True
        try:
            yield
        finally:
            self._inside = False

    def meet(self, call: str) -> None:
        """Block until every rank is at this call of the script's; UsageError where one does not come."""
        if self._ranks is not None:
            self._ranks.meet(call, patience=PATIENCE)

    def _look(self, module: nn.Module, args: Any) -> None:
        if self._inside:
            return
        if self._layout.pp > 1:
            raise UsageError(
                f"model(...) was called outside run.backward, and in this layout ({self._layout}) each rank has the "
                "layers of its own stage alone. Evaluate from a checkpoint in another program (elastic3d ckpt export), "
                "or fix elastic3d.run(layout=Layout(pp=1)) and call it on every rank alike"
            )
        self.meet("model(...) outside run.backward")

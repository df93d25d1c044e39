"""Forward passes that a script makes itself, outside `run.backward`: what cannot work is refused by name.

With pipeline stages each rank has a part of the model alone. Without, the ranks gather parameters for each other, so
that a pass that some of them make and others do not would wait for ever.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import nn

from elastic3d.errors import UsageError
from elastic3d.values import Layout

PATIENCE = 60.0
"""Seconds the ranks wait for each other before such a pass."""

LATE = ("monitoredBarrier", "Wait timeout", "Timed out")
"""In the words of gloo's errors where a rank did not come, and none was lost."""


class Outside:
    """Looks on at a model's forward passes. `inside()` surrounds those of `run.backward`."""

    def __init__(self, model: nn.Module, layout: Layout, rank: int) -> None:
        self._layout, self._rank, self._inside = layout, rank, False
        if layout.world > 1:
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

    def _look(self, module: nn.Module, args: Any) -> None:
        if self._inside:
            return
        if self._layout.pp > 1:
            raise UsageError(
                f"model(...) was called outside run.backward, and in this layout ({self._layout}) each rank has the "
                "layers of its own stage alone. Evaluate from a checkpoint in another program (elastic3d ckpt export), "
                "or fix elastic3d.run(layout=Layout(pp=1)) and call it on every rank alike"
            )
        if dist.get_backend() == "gloo":
            self._meet()

    def _meet(self) -> None:
        try:
            dist.monitored_barrier(timeout=timedelta(seconds=PATIENCE))
        except RuntimeError as error:
            if not any(word in str(error) for word in LATE):
                raise
            raise UsageError(
                f"model(...) was called outside run.backward on rank {self._rank}, and not on every rank within "
                f"{PATIENCE:g} s: the others would be waited for for ever. Call it on every rank alike, as often and "
                "in the same order, not under `if run.rank == 0`; or evaluate from a checkpoint in another program "
                "(elastic3d ckpt export)"
            ) from error

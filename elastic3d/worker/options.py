"""What a script says to `elastic3d.run`, checked where it enters."""

from __future__ import annotations

import re
from dataclasses import dataclass

from elastic3d.errors import UsageError
from elastic3d.values import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """store: URL of the checkpoints, None for none. layout: axes to fix. events: folder for event files.

    snapshot_every, checkpoint_every: in steps, 0 for never. threads: CPU threads per trainer for tensor operations.
    """

    store: str | None = None
    layout: Layout | None = None
    events: str | None = None
    snapshot_every: int = 1
    checkpoint_every: int = 10
    threads: int = 1

    def __post_init__(self) -> None:
        for name, least in (("snapshot_every", 0), ("checkpoint_every", 0), ("threads", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise UsageError(f"elastic3d.run({name}={value!r}): give a whole number, {least} or more")
        if self.store is not None and not re.match(r"^([a-z0-9+]+://|/|\.)", self.store):
            raise UsageError(f"elastic3d.run(store={self.store!r}): give a URL such as s3://bucket/run, or a path")
        if self.layout is not None and not isinstance(self.layout, Layout):
            raise UsageError(f"elastic3d.run(layout={self.layout!r}): give an elastic3d.Layout, e.g. Layout(pp=2)")

"""Writing a damaged or lost `refs/latest` anew, from what the store still has (format.md, section 9)."""

from __future__ import annotations

from checkpointing.format.refs import Ref
from checkpointing.stores.protocol import Store


def repair_latest(store: Store, *, generation: int = 0) -> Ref:
    """Write `latest` anew when it cannot be read, and return it; one that can be read is returned as it is.

    generation: of the run that goes on, if known; the fence is never put below what any record shows.
    """
    raise NotImplementedError

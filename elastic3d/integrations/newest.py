"""The newest checkpoint of a store that a script of another library saves to."""

from __future__ import annotations

from checkpointing import open_store, read_latest
from checkpointing.errors import NoCheckpoint
from checkpointing.format import names
from checkpointing.reading.registered import check_register


def newest_step(url: str) -> int | None:
    """Return the step of the newest committed checkpoint of a store, None where there is none yet.

    StoreUnfit where the script could not save there, which else would show only at its first save.
    """
    store = open_store(url)
    check_register(store)
    try:
        latest = read_latest(store)
    except NoCheckpoint:
        return None
    parsed = names.parse_checkpoint(latest.checkpoint) if latest is not None and latest.checkpoint else None
    return None if parsed is None else parsed[0].step

"""Shell completion of checkpoints and tensors of local stores. Other stores would make the Tab key wait."""

from __future__ import annotations

import typer

from checkpointing import open_store, read_latest
from checkpointing.errors import CheckpointError
from checkpointing.format.names import parse_checkpoint
from checkpointing.stores.address import parse


def complete_checkpoints(context: typer.Context, incomplete: str) -> list[str]:
    """Return the names of the given store's checkpoints that begin with `incomplete`."""
    try:
        store = open_store(_local(context), write=False)
        ref = read_latest(store)
    except (CheckpointError, OSError, ValueError):
        return []
    listed = ref.committed if ref is not None else ()
    steps = [str(parsed[0].step) for name in listed if (parsed := parse_checkpoint(name))]
    return [
        name
        for name in ("latest", "verified", "vetted", *_tags(context), *steps, *listed)
        if name.startswith(incomplete)
    ]


def complete_tensors(context: typer.Context, incomplete: str) -> list[str]:
    """Return the tensors of the newest checkpoint whose names begin with `incomplete`."""
    from checkpointing import open_checkpoint

    try:
        checkpoint = open_checkpoint(open_store(_local(context), write=False))
    except (CheckpointError, OSError, ValueError):
        return []
    return [key for key in checkpoint.specs if key.startswith(incomplete)]


def _local(context: typer.Context) -> str:
    url = str(context.params.get("url") or "")
    path = parse(url).path
    if path is None or not path.is_dir():
        raise ValueError(f"{url} is not a local directory")
    return str(path)


def complete_tags(context: typer.Context, incomplete: str) -> list[str]:
    """Return the tags that begin with `incomplete`."""
    return [name for name in _tags(context) if name.startswith(incomplete)]


def _tags(context: typer.Context) -> list[str]:
    try:
        ref = read_latest(open_store(_local(context), write=False))
    except (CheckpointError, OSError, ValueError):
        return []
    return sorted(ref.tags) if ref is not None else []

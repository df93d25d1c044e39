"""Damage to a checkpoint in a directory."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from checkpointing import Store, open_checkpoint
from checkpointing.format import names


def spoil_tiles(store: Store, step: int, older: Iterable[int]) -> None:
    """Change one byte in every pack of the checkpoint of `step` that those of the `older` steps do not need."""
    needed = {pack for before in older for pack in open_checkpoint(store, str(before)).packs}
    for pack in set(open_checkpoint(store, str(step)).packs) - needed:
        path = Path(store.url.removeprefix("file://")) / names.pack(pack)
        data = bytearray(path.read_bytes())
        data[100] ^= 1
        path.chmod(0o644)
        path.write_bytes(data)

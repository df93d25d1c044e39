"""Verified checkpoints: tiles in, checkpoints out. The format is in format.md.

Ranks call `save_rank`, a leader `fence` and `commit`; `open_checkpoint` and `resolve` bring tensors back under any
layout; `verify` finds every byte that is not as it was written.
"""

from checkpointing.commit import Committed, commit, fence
from checkpointing.opening import open_store
from checkpointing.reader import Checkpoint, open_checkpoint, read_latest
from checkpointing.refs import Ref
from checkpointing.resolver import Offered, Resolved, TileSource, resolve
from checkpointing.save import SavedRank, save_rank
from checkpointing.store import Store
from checkpointing.tiles import Box, Piece, TensorSpec
from checkpointing.verify import Finding, verify

__all__ = [
    "Store", "open_store",
    "TensorSpec", "Box", "Piece",
    "save_rank", "SavedRank",
    "fence", "commit", "Committed",
    "read_latest", "Ref", "open_checkpoint", "Checkpoint",
    "resolve", "Offered", "TileSource", "Resolved",
    "verify", "Finding",
]  # fmt: skip

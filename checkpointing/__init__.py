"""Verified checkpoints: tiles in, checkpoints out. The format is in format.md.

Ranks call `save_rank`, a leader `fence` and `commit`; `open_checkpoint` and `resolve` bring tensors back under any
layout; `verify` finds every byte that is not as it was written; `tag`, `pin`, `mark_verified` and `mark_vetted` keep
checkpoints, `mark_distrusted` says which ones no run goes on from, `collect` deletes what is not kept.
"""

from checkpointing.format.distrust import Distrust
from checkpointing.format.refs import Ref
from checkpointing.format.tiles import Box, Piece, TensorSpec
from checkpointing.reading.naming import read_ref, resolve_name
from checkpointing.reading.reader import Checkpoint, open_checkpoint, read_latest
from checkpointing.reading.resolver import Offered, Resolved, TileSource, resolve
from checkpointing.reading.verify import Finding, verify
from checkpointing.retention.collection import Collected, CollectionPlan, collect, plan_collection
from checkpointing.retention.policy import Retention
from checkpointing.retention.protection import (
    mark_distrusted,
    mark_verified,
    mark_vetted,
    pin,
    pins,
    tag,
    tags,
    unpin,
    untag,
)
from checkpointing.retention.ref_repair import repair_latest
from checkpointing.saving.commit import Committed, commit, fence
from checkpointing.saving.options import SaveOptions
from checkpointing.saving.save import SavedRank, save_rank
from checkpointing.stores.keys import Key
from checkpointing.stores.opening import open_store
from checkpointing.stores.protocol import Store
from checkpointing.stores.register import Register

__all__ = [
    "Store", "open_store", "Key", "Register",
    "TensorSpec", "Box", "Piece",
    "save_rank", "SaveOptions", "SavedRank",
    "fence", "commit", "Committed",
    "read_latest", "Ref", "open_checkpoint", "Checkpoint",
    "resolve", "Offered", "TileSource", "Resolved",
    "verify", "Finding",
    "read_ref", "resolve_name", "mark_verified", "mark_vetted", "mark_distrusted", "Distrust",
    "tag", "untag", "tags", "pin", "unpin", "pins",
    "Retention", "plan_collection", "CollectionPlan", "collect", "Collected", "repair_latest",
]  # fmt: skip

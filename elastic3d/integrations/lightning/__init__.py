"""Checkpoints of Lightning in a store of ours: committed, digested, written in the background.

plugin       the CheckpointIO that a Trainer is given
tree         a checkpoint of Lightning as tensors by name and a skeleton
"""

from elastic3d.integrations.lightning.plugin import checkpoint_io

__all__ = ["checkpoint_io"]

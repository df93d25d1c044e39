"""Checkpoints of Lightning in a store of ours: committed, digested, written in the background."""

from elastic3d.integrations.lightning.plugin import checkpoint_io

__all__ = ["checkpoint_io"]

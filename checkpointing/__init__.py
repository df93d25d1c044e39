"""Verified incremental checkpoints: tiles in, checkpoints out."""

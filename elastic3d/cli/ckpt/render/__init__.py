"""Displays of what `checkpointing.inspection` computes, for terminals of any width."""

"""Which states a run does not go on from: the rules that a conviction leaves, as records and stores keep them."""

from __future__ import annotations

from checkpointing.format.distrust import Distrust, refused, with_rule, with_rules

__all__ = ["Distrust", "refused", "with_rule", "with_rules"]

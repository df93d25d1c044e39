"""Telling a lost peer from an error of the user's code."""

from __future__ import annotations

import torch.distributed as dist

# gloo's errors are plain RuntimeErrors, to be known by their words alone.
WORDS = ("gloo/", "Connection closed by peer", "Connection reset by peer", "Broken pipe", "NCCL", "Socket Timeout")


def is_lost_peer(error: BaseException) -> bool:
    """Return whether a collective failed, here or in what caused this error: torch's pipelines wrap what they catch."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, dist.DistError):
            return True
        if isinstance(seen, RuntimeError) and seen.__cause__ is None and any(word in str(seen) for word in WORDS):
            return True
        seen = seen.__cause__
    return False

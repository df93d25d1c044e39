"""What must be the same on every node beside the model and its batches: the script itself, optimizer and schedule."""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3

from elastic3d.errors import StateError
from elastic3d.parallel import facts


@functools.cache
def script_digest() -> str:
    """Return the digest of the file this process runs as its script, "" where there is none.

    Read once, when the script calls `elastic3d.run`: a file that is changed later is not what runs.
    """
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    try:
        return "" if path is None else blake3(Path(path).read_bytes()).hexdigest()[:32]
    except OSError:
        return ""


def schedule_digest(optimizer: torch.optim.Optimizer, schedule: Any) -> str:
    """Return the digest of a fresh optimizer's class and hyperparameters, and of the schedule's."""
    said = [kind_of(optimizer), kind_of(schedule)]
    try:
        said += [facts.optimizer_groups(optimizer), facts.schedule_state(schedule)]
    except StateError:
        # What cannot be written down cannot be compared; whoever needs it written down will say so.
        pass
    return blake3(json.dumps(said, sort_keys=True).encode()).hexdigest()[:32]


def kind_of(thing: Any) -> str:
    """Return the name of an object's class, "" for None."""
    return "" if thing is None else f"{type(thing).__module__}.{type(thing).__qualname__}"

"""Paths that people give: `~` at the beginning is their home, as in a shell."""

from __future__ import annotations

import os
from pathlib import Path

from checkpointing.stores.address import NO_USER
from elastic3d.errors import UsageError


def expanded(given: str | os.PathLike[str], name: str) -> Path:
    """Return what was given as a path, with the home for a `~`; UsageError, beginning with `name`, for what is none."""
    try:
        return Path(given).expanduser()
    except TypeError:
        raise UsageError(f"{name}={given!r}: give a path") from None
    except RuntimeError:
        raise UsageError(f"{name}={given!r}: {NO_USER}") from None

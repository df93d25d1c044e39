"""Folders for what is kept of runs."""

from __future__ import annotations

from pathlib import Path


def free_folder(out: Path, name: str) -> Path:
    """Return the folder of that name below `out`, or name.2, name.3... where it is taken."""
    folder, times = out / name, 1
    while folder.exists():
        times += 1
        folder = out / f"{name}.{times}"
    return folder

"""Folders and files for what is kept of runs: tried before anything is played, since runs may take hours."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from elastic3d.errors import UsageError


def free_folder(out: Path, name: str) -> Path:
    """Return the folder of that name below `out`, or name.2, name.3... where it is taken."""
    folder, times = out / name, 1
    while folder.exists():
        times += 1
        folder = out / f"{name}.{times}"
    return folder


def writable_folder(folder: Path) -> None:
    """Make a folder and try to write into it; UsageError where that fails."""
    with in_words(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"tried")


def writable_file(file: Path) -> None:
    """Make the folder of a file and try to write the file, whose content stays; UsageError where that fails."""
    with in_words(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        before = file.exists()
        with file.open("ab"):
            pass
        if not before:
            file.unlink()


@contextmanager
def in_words(path: Path) -> Iterator[None]:
    """Raise UsageError with what to do where something at or below a path cannot be written."""
    try:
        yield
    except OSError as error:
        where = error.filename or path
        why = error.strerror or error
        raise UsageError(f"{where}: it cannot be written: {why}; name another place, or mend that") from None

"""Places for what is kept of runs: tried before anything is played, since runs may take hours."""

from __future__ import annotations

import contextlib
import itertools
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from elastic3d.errors import UsageError


def new_folder(out: Path, name: str) -> Path:
    """Make the folder of that name below `out`, or name.2, name.3... where it is taken; UsageError where that fails.

    Whoever makes one at the same time gets another.
    """
    with in_words(out):
        out.mkdir(parents=True, exist_ok=True)
    for times in itertools.count(1):
        folder = out / (name if times == 1 else f"{name}.{times}")
        with in_words(folder), contextlib.suppress(FileExistsError):
            folder.mkdir()
            return folder
    raise AssertionError("the numbers have no end")


@contextmanager
def whole_folder(out: Path, name: str) -> Iterator[Path]:
    """Make such a folder for what the block writes: with all of that it stays, and with less it is gone.

    UsageError where it cannot be written.
    """
    folder = new_folder(out, name)
    try:
        with in_words(folder):
            yield folder
    except BaseException:  # also where a person ends it here
        shutil.rmtree(folder, ignore_errors=True)
        raise


def writable_folder(folder: Path) -> None:
    """Make a folder and try to write into it; UsageError where that fails."""
    with in_words(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"tried")


def begin_file(file: Path) -> None:
    """Make a file, and its folder, or empty it; UsageError where that fails.

    It stays empty if nothing is written to it: what an earlier run drew is not taken for what this one has shown.
    """
    with in_words(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"")


@contextmanager
def in_words(path: Path) -> Iterator[None]:
    """Raise UsageError with what to do where something at or below a path cannot be written."""
    try:
        yield
    except OSError as error:
        where = error.filename or path
        why = error.strerror or error
        raise UsageError(f"{where}: it cannot be written: {why}; name another place, or mend that") from None

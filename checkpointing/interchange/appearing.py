"""Files and folders that appear whole or not at all: written beside their place under a hidden name, then renamed."""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from checkpointing.errors import NotExportable

_BYTES = 4


@contextmanager
def appearing(path: Path) -> Iterator[Path]:
    """Yield where to write what is to become `path`; whatever ends the block early, nothing is left of it.

    NotExportable if the path is there already, or cannot be written. A process that is killed leaves the hidden name,
    which `left_behind` knows.
    """
    if os.path.lexists(path):
        raise _there_already(path)
    partial = path.with_name(f".{path.stem}.{secrets.token_hex(_BYTES)}{path.suffix}")
    try:
        yield partial
        _put_into_place(partial, path)
    except BaseException as error:
        remove(partial)
        if isinstance(error, OSError):
            raise NotExportable(f"{path}: cannot be written: {error}; nothing is left of it") from error
        raise


def _put_into_place(partial: Path, path: Path) -> None:
    """Give a file or folder its name, which another one may have got meanwhile; only an empty folder is replaced."""
    if partial.is_file():
        try:
            os.link(partial, path)
        except OSError as error:  # the name is taken, or the file system has no hard links
            if os.path.lexists(path):
                raise _there_already(path) from error
        else:
            partial.unlink()
            return
    try:
        partial.rename(path)
    except OSError as error:
        if os.path.lexists(path):
            raise _there_already(path) from error
        raise


def _there_already(path: Path) -> NotExportable:
    return NotExportable(f"{path}: is there already; nothing is overwritten")


def left_behind(folder: Path, stem: str) -> list[Path]:
    """Return what killed processes have left of paths in a folder. stem: a pattern of their names, as `re` has it."""
    hidden = re.compile(rf"\.{stem}\.[0-9a-f]{{{2 * _BYTES}}}(\.\w+)?")
    return sorted(path for path in folder.iterdir() if hidden.fullmatch(path.name))


def remove(path: Path) -> None:
    """Delete a file or a folder, as far as it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)

"""Writing the files of a new job: all or none, and over nothing that is there unless that was asked for."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from elastic3d.errors import ConfigurationError, UsageError
from elastic3d.scaffold.files import NewFile


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedFile:
    """A file with its whole path. there: one of that name exists. same: with the same text."""

    path: Path
    text: str
    there: bool
    same: bool


def planned(folder: Path, files: Sequence[NewFile]) -> tuple[PlannedFile, ...]:
    """Return what would be written to `folder`; UsageError where a folder or a link stands in a file's way."""
    try:
        return tuple(_planned(folder, one) for one in files)
    except OSError as error:
        raise UsageError(f"{folder} cannot be looked at: {error.strerror}; give another folder") from error


def _planned(folder: Path, file: NewFile) -> PlannedFile:
    path = folder / file.path
    for above in (folder, *(folder / part for part in reversed(file.path.parents))):
        if (above.exists() or above.is_symlink()) and not above.is_dir():
            raise UsageError(f"{above} is no folder; move it away, or give another folder")
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise UsageError(f"{path} is no plain file, and would not be replaced; move it away, or give another folder")
    try:
        before = path.read_bytes()
    except FileNotFoundError:
        return PlannedFile(path=path, text=file.text, there=False, same=False)
    return PlannedFile(path=path, text=file.text, there=True, same=before == file.text.encode())


def refuse_overwriting(files: Sequence[PlannedFile]) -> None:
    """Raise UsageError, naming them, if files with another text are there."""
    there = [str(file.path) for file in files if file.there and not file.same]
    if there:
        raise UsageError(
            f"{', '.join(there)}: there already, with other contents; nothing was written. --force replaces "
            f"{'it' if len(there) == 1 else 'them'}, another folder does without"
        )


def write(files: Sequence[PlannedFile]) -> None:
    """Write all files that are not the same, each at once; ConfigurationError names the one that could not be.

    New contents are all on the disk before the first name leads to them: a full disk leaves everything as it was.
    """
    parts: list[tuple[Path, Path]] = []
    at: Path | None = None
    try:
        for file in files:
            if file.same:
                continue
            at = file.path
            at.parent.mkdir(parents=True, exist_ok=True)
            number, name = tempfile.mkstemp(prefix=f".{at.name}.", dir=at.parent)
            parts.append((Path(name), at))
            with open(number, "wb") as part:
                part.write(file.text.encode())
                part.flush()
                os.fsync(part.fileno())
            Path(name).chmod(0o644)
        while parts:
            part_path, at = parts[0]
            part_path.replace(at)
            parts.pop(0)
    except OSError as error:
        raise ConfigurationError(f"{at} cannot be written: {error.strerror}; mend that, and try again") from error
    finally:
        for part_path, _ in parts:
            part_path.unlink(missing_ok=True)

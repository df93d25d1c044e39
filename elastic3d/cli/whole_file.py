"""A file that a command writes whole, or not at all."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from elastic3d.errors import UsageError

STDOUT = "-"


@contextmanager
def whole_file(output: str, example: str) -> Iterator[TextIO]:
    """Yield a file that takes the place of `output`, an option's value, when all was written; "-" is standard output.

    What is no file, as a pipe or a device, is written to as it is. example: a name to give. UsageError for a folder, or
    where there is none for it.
    """
    if output == STDOUT:
        yield sys.stdout
        sys.stdout.flush()
        return
    path = Path(output)
    if path.is_dir():
        raise UsageError(f"--output {output!r} is a folder; give a file, such as {str(path / example)!r}")
    if not path.parent.is_dir():
        raise UsageError(f"--output {output!r}: there is no folder {str(path.parent)!r}")
    if path.exists() and not path.is_file():
        with path.open("w", encoding="utf-8") as pipe:
            yield pipe
        return
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with unfinished.open("w", encoding="utf-8") as file:
            yield file
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)

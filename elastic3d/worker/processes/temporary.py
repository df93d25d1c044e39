"""The folder in which a trainer's multiprocessing keeps its sockets: who outlives the trainer makes and removes it.

A process that hands tensors to another one through multiprocessing, as each of a data loader's does, listens on a
socket in a folder, `pymp-*`. It makes one by itself and removes it when it ends; one that is killed leaves it, and so
do all of a trainer that is killed, or that ends at once for the next generation. A process that has a folder already
passes it on to those that it starts: so each trainer is given one by its keeper, which removes it once the trainer's
whole group is gone. Nothing else that a script puts into temporary files is in it.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from multiprocessing import process

PREFIX = "pymp-"
"""As multiprocessing calls its own: a longer path may be too long for a socket's name."""


def make() -> str:
    """Return a new folder where multiprocessing would make it, "" where none can be made: then it tries by itself."""
    try:
        return tempfile.mkdtemp(prefix=PREFIX)
    except OSError:
        return ""


def use(folder: str) -> None:
    """Have multiprocessing use a folder, in this process and in those that it starts; "" changes nothing."""
    if folder:
        # What `multiprocessing.util.get_temp_dir` goes by, and what processes inherit; there is no call that sets it.
        process.current_process()._config["tempdir"] = folder  # type: ignore[attr-defined]


def remove(folder: str) -> None:
    """Remove a folder and what is in it, as far as that can be done."""
    if folder:
        with contextlib.suppress(OSError):
            shutil.rmtree(folder)

"""The folder in which a trainer's multiprocessing keeps its sockets: who outlives the trainer removes it.

A process that hands tensors to another one through multiprocessing, as each of a data loader's does, listens on a
socket in a folder, `pymp-*`. It makes one by itself and removes it when it ends; one that is killed leaves it, and so
do all of a trainer that is killed, or that ends at once for the next generation. So a keeper names one folder for each
trainer. The trainer, or a process that it has forked, makes it when it is needed, which it is not in most jobs, and the
keeper removes it once the trainer's whole group is gone. Nothing else that a script puts into temporary files is in it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import tempfile
from multiprocessing import util

PREFIX = "pymp-"
"""As multiprocessing calls its own, and no longer: the path of a socket has a limit."""


def name() -> str:
    """Return a new folder's name, where multiprocessing would make it; "" where there is no place: it says so then."""
    try:
        return os.path.join(tempfile.gettempdir(), PREFIX + secrets.token_hex(4))
    except OSError:
        return ""


def use(folder: str) -> None:
    """Have multiprocessing use a folder, in this process and in those that it forks; "" changes nothing."""

    def get_temp_dir() -> str:
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, 0o700)
        return folder

    if folder:
        # There is no setting for it: the one it has is made at once, and needed by few.
        util.get_temp_dir = get_temp_dir


def remove(folder: str) -> None:
    """Remove a folder and what is in it, if it was made, as far as that can be done."""
    if folder:
        with contextlib.suppress(OSError):
            shutil.rmtree(folder)

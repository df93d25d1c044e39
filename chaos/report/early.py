"""What ends a command before its time, said at its edge."""

from __future__ import annotations

import errno
import sys
import tempfile
import traceback
from typing import TypeGuard

from elastic3d.errors import Elastic3dError, UsageError

MOST = 3
"""Runs in a row that an error ends, after which no other one is begun: what fails each time is not of one run."""


def say(error: Exception) -> int:
    """Say on standard error what happened, where nobody foresaw it with its traceback; return its exit code."""
    if isinstance(error, Elastic3dError):
        print(f"elastic3d: {error}", file=sys.stderr)
        return error.exit_code
    if _full(error):
        where, folder = f"{error.filename}: " if error.filename else "", tempfile.gettempdir()
        todo = f"make room there, or for temporary files in {folder}; TMPDIR names another folder for these"
        print(f"elastic3d: {where}{error.strerror}; {todo}", file=sys.stderr)
    else:
        traceback.print_exception(error)
    return 1


def in_a_line(error: Exception) -> str:
    """Return an error as documents have it."""
    return str(error) if isinstance(error, Elastic3dError) else f"{type(error).__name__}: {error}"


def of_one_run(error: Exception) -> bool:
    """Return whether another run may do without an error: neither bad input, nor a disk that is full."""
    return not (_full(error) or isinstance(error, UsageError))


def _full(error: Exception) -> TypeGuard[OSError]:
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)

"""Tells a lost peer from an error of the user's code."""

from __future__ import annotations

import dis

import torch.distributed as dist

from elastic3d.errors import Elastic3dError

# gloo's errors are plain RuntimeErrors, recognised by their message and by their origin in C++.
NOT_A_PEER = ("ncclUnhandledCudaError", "ncclInternalError", "ncclInvalidArgument", "ncclInvalidUsage")
"""What NCCL calls failures of this rank's own device, of its configuration, or of how it was called."""

WORDS = ("gloo/", "Connection closed by peer", "Connection reset by peer", "Broken pipe", "NCCL", "Socket Timeout")


def is_lost_peer(error: BaseException) -> bool:
    """Return whether this error, or one that caused it, is a failed collective: torch's pipelines wrap what they catch.

    An error of elastic3d itself says what happened, whatever caused it.
    """
    seen: BaseException | None = error
    while seen is not None and not isinstance(seen, Elastic3dError):
        if isinstance(seen, dist.DistError):
            return not any(word in str(seen) for word in NOT_A_PEER)
        if isinstance(seen, RuntimeError) and seen.__cause__ is None and any(word in str(seen) for word in WORDS):
            return not raised_in_python(seen)
        seen = seen.__cause__
    return False


def raised_in_python(error: BaseException) -> bool:
    """Return whether a `raise` made this error, rather than a C++ function that Python called.

    No collective is written in Python: an error raised there, by a user's code or a loader's worker, is the user's,
    even if its message is that of a broken connection.
    """
    trace = error.__traceback__
    if trace is None:
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    return dis.opname[trace.tb_frame.f_code.co_code[trace.tb_lasti]] == "RAISE_VARARGS"

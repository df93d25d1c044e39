"""Stacks of a trainer's threads, written by the trainer itself into memory that its keeper made, while it hangs.

`faulthandler` needs neither the interpreter's lock nor memory, so that it works while foreign code holds both. The
signal is sent only to a process that has said that it catches it: by default SIGUSR2 kills.
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from elastic3d.clock import Clock

LARGEST = 256 << 10
"""Bytes of stacks that are read."""

PATIENCE = 0.05
"""Seconds for which stacks are waited for: they are there after some milliseconds, or when the process runs again."""

_COLLECTIVES = (
    "torch/distributed/distributed_c10d.py",
    "torch/distributed/_functional_collectives.py",
    "elastic3d/parallel/all_ranks.py",
)
"""Files in which a rank waits for others."""

_OURS = ("/torch/", "/elastic3d/parallel/", "/elastic3d/training/")
"""Parts of the paths of files that are no script's."""

_NEAR = 4
"""Innermost frames among which one of those files says that the rank waits."""

_THREAD = re.compile(r"(?:Thread|Current thread) 0x([0-9a-f]+)")
_FRAME = re.compile(r'File "(.*)", line (\d+|\?+) in (.*)')


def write_stacks_to(descriptor: int) -> None:
    """Have this process write the stacks of all its threads to a descriptor whenever it gets SIGUSR2."""
    faulthandler.register(signal.SIGUSR2, file=descriptor, all_threads=True, chain=False)


def caught_here() -> bool:
    """Whether SIGUSR2 is left to `write_stacks_to`: a handler of the script's own shows, faulthandler's does not."""
    return signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL


def ask(pid: int, descriptor: int) -> None:
    """Have a process write its stacks if it catches SIGUSR2; those asked for before are forgotten."""
    try:
        if not _catches(pid):
            return
        os.ftruncate(descriptor, 0)
        # Both processes share the place where the next write goes.
        os.lseek(descriptor, 0, os.SEEK_SET)
        os.kill(pid, signal.SIGUSR2)
    except OSError:
        pass  # it is gone, and its end is reported elsewhere


def answer(descriptor: int, clock: Clock, patience: float = PATIENCE) -> str:
    """Return the stacks that have been asked for, "" if they are not all there in time."""
    deadline = clock.monotonic() + patience
    while True:
        text = os.pread(descriptor, LARGEST, 0).decode(errors="replace")
        if text.endswith("\n") and _THREAD.search(text):
            return text
        if clock.monotonic() >= deadline:
            return ""
        clock.sleep(0.002)


def _catches(pid: int) -> bool:
    # Its name may be any bytes.
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    masks = [line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")]
    return bool(masks) and bool(int(masks[0], 16) >> (signal.SIGUSR2 - 1) & 1)


def top_frame(stacks: str, thread: int) -> str:
    """Return where a thread is, as "file:line in function", "" if the stacks do not say. thread: its number."""
    return next((f"{Path(file).name}:{line} in {name}" for file, line, name in _frames(stacks, thread)), "")


def calling_frame(stacks: str, thread: int) -> str:
    """Return where a thread has called torch or the runtime, as `top_frame`; "" if the stacks do not say."""
    outside = (one for one in _frames(stacks, thread) if not any(part in one[0] for part in _OURS))
    return next((f"{Path(file).name}:{line} in {name}" for file, line, name in outside), "")


def in_collective(stacks: str, thread: int) -> bool:
    """Return whether a thread is within a collective that nobody recorded: the script's own, or one of tp."""
    return any(file.endswith(_COLLECTIVES) for file, _, _ in islice(_frames(stacks, thread), _NEAR))


def _frames(stacks: str, thread: int) -> Iterator[tuple[str, str, str]]:
    """Yield file, line and function of a thread's frames, the innermost first."""
    here = False
    for line in stacks.splitlines():
        if match := _THREAD.match(line.strip()):
            here = int(match[1], 16) == thread
        elif here and (match := _FRAME.match(line.strip())):
            yield match[1], match[2], match[3]

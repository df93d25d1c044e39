"""How a failure reaches people: in words, and in torchrun's error file, in the format its own `record` writes."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable

from elastic3d import environment, output
from elastic3d.errors import Elastic3dError
from elastic3d.worker.processes.events import TrainerExited

TRACEBACK = "Traceback (most recent call last):"
"""How a traceback begins."""

OUT_OF_MEMORY = (
    "What helps: a smaller micro_batch; run.shard(..., recompute='full'); more nodes, or fewer slots a node; ending "
    "what else holds the memory"
)
"""What to do where memory ran out."""

FLUSH_PATIENCE = 2.0
"""Seconds that the last words of a process have to be written."""


def record(error: BaseException) -> None:
    """Write the error, with the trainer's traceback, where torchrun looks for it, and say it on stderr."""
    text = str(error)
    path = environment.TORCH_ERROR_FILE.read()
    # torchrun shows its file's contents when it ends: the traceback need not be shown twice.
    output.say(text.partition(TRACEBACK)[0].rstrip() if path else text)
    if path:
        extra = {"py_callstack": text, "timestamp": str(int(time.time()))}
        message = {"message": f"{type(error).__name__}: {text.splitlines()[0] if text else ''}", "extraInfo": extra}
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "w") as file:
                json.dump({"message": message}, file)
        except OSError as problem:
            output.say(f"torchrun's error file {path} could not be written: {problem}")
    output.flush(FLUSH_PATIENCE)


def ended(detail: str, raised: str) -> str:
    """Return why the job ended, with the traceback only on the node that raised it. raised: this node's error."""
    first, traceback, _ = detail.partition(TRACEBACK)
    if not traceback or (raised and raised in detail):
        return detail
    return f"{first.rstrip()} (the traceback is in the output of that node)"


def words(event: TrainerExited, node: str, rank: int) -> str:
    """Return what ended a trainer, with its traceback where its code raised."""
    raised = event.exception
    if raised is None:
        return f"rank {rank} on {node}: {event.detail or event.kind}"
    used = "" if raised.memory_use is None else f"\n{raised.memory_use}\n{OUT_OF_MEMORY}"
    return f"rank {rank} on {node}: {raised.kind}: {raised.message}{used}\n\n{raised.traceback[-8000:]}"


def guarded(work: Callable[[], None]) -> int:
    """Run a keeper's work and return its exit code; an error goes to torchrun's error file and to stderr."""
    try:
        work()
    except Elastic3dError as error:
        record(error)
        return error.exit_code
    return 0

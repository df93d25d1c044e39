"""A process that forks workers: everything is imported once, and each worker is a process that can be killed.

It has no threads, reads one JSON line per batch (a list of tasks that run at the same time) and answers with one: for
each task its exit status as `subprocess` has it, and what it said.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from chaos.failpoints.work import Task, work
from chaos.machine.processes import leashed


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a worker ended: 0 or minus the signal, and its result."""

    status: int
    said: str


class Nursery:
    """Runs batches of tasks in processes of their own."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def run(self, tasks: Sequence[Task]) -> list[Ended]:
        """Run tasks at the same time, and wait for all of them."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([task.document() for task in tasks]) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise ChildProcessError("the nursery ended; what it said is on standard error")
        return [Ended(status=status, said=said) for status, said in json.loads(line)]


@contextlib.contextmanager
def nursery() -> Iterator[Nursery]:
    """Run a nursery until the block ends."""
    process = subprocess.Popen(
        leashed([sys.executable, "-m", "chaos.failpoints.nursery"]),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        yield Nursery(process)
    finally:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.close()
        process.wait()
        process.stdout.close()


def main() -> None:
    """Answer batches until standard input ends."""
    # Imported before the first fork, not by every worker; neither starts a thread.
    import fsspec  # noqa: F401

    with contextlib.suppress(ImportError):
        import s3fs  # noqa: F401
    for line in sys.stdin:
        started = [_start(Task(**given)) for given in json.loads(line)]
        print(json.dumps([_wait(pid, reader) for pid, reader in started]), flush=True)


def _start(task: Task) -> tuple[int, int]:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writer)
        return pid, reader
    try:
        os.close(reader)
        os.write(writer, work(task).encode())
        os._exit(0)
    except BaseException:  # noqa: BLE001 (a process's edge)
        os.write(writer, traceback.format_exc().encode()[-8000:])
        os._exit(1)


def _wait(pid: int, reader: int) -> tuple[int, str]:
    said = bytearray()
    while part := os.read(reader, 1 << 16):
        said += part
    os.close(reader)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), said.decode()


if __name__ == "__main__":
    main()

"""What is kept of ranks that stand still, taken before anybody kills them: files for people, one folder per stall.

    <events>/evidence/<generation>.<attempt>-<step>-stuck-<node>/
        slot<N>/record.bin     the progress page, as it was
        slot<N>/program.txt    the operations of the present step and of the one before
        slot<N>/stall.json     what the node said of the rank
        slot<N>/stacks.txt     of all threads, where the trainer could write them
        slot<N>/proc.txt       state, wait channel and system call of each thread; status and I/O of the process
        verdict.json           on the leader's node: what was found
        stalls.json            on the leader's node: what all nodes said, which the verdict was made from
        waits.txt              on the leader's node: who waits for whom

Each slot's keeper writes its own part. What is taken of a rank that moves again is removed. The whole of a node is
bounded in bytes; a folder that is full or cannot be written is reported once, and harms nothing.

Only ranks that stand still leave a bundle, since what they were at is lost with their processes. What shows that a node
is slow, or computes wrongly, is voted or heard by all: events carry it whole, and `elastic3d explain` reads it there.
torch's flight recorder is not asked. The record has all collectives but those of tensor parallelism and of the script,
and of these the stack tells as much as the verdict needs, without a server in each trainer and 15 us a collective.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from elastic3d import threads
from elastic3d.health.processes import read_proc, stat_fields
from elastic3d.health.record import programs, steps
from elastic3d.health.watch import Taken
from elastic3d.membership.stalls import Stall, Verdict
from elastic3d.values import to_json

FOLDER = "evidence"
"""The folder's name beside the event files."""

VERDICT, STALLS, WAITS = "verdict.json", "stalls.json", "waits.txt"

SCHEMA = 1
WAITING = 64
"""Most writes that may wait for a disk that hangs; later ones are left out."""

THREADS = 128
"""Most threads of a trainer that are looked at."""


class EvidenceWriter:
    """Writes one slot's part of a node's evidence, on a thread of its own: a disk that hangs holds nobody up.

    Any thread may call it, and waits for nothing; the thread is started when there is something to write. folder: the
    one of the event files, "" for none, where nothing is written. limit: bytes that this node's evidence may take.
    failed: called once with what went wrong, and again after it has worked in between: on that thread, or where the
    disk hangs on that of a caller.
    """

    def __init__(
        self, folder: str, node: str, slot: int, *, limit: int, failed: Callable[[str], None] = lambda error: None
    ) -> None:
        self._folder = Path(folder) / FOLDER if folder else None
        self._node, self._slot, self._limit, self._failed = node, slot, limit, failed
        self._failing = False
        self._taken: dict[int, Path] = {}
        self._lock = threading.Lock()
        self._work: queue.SimpleQueue[Callable[[], None]] | None = None

    def take(self, taken: Taken) -> None:
        """Keep what was taken of a rank, in the place of what was taken of it before; look at its processes now."""
        if self._folder is not None:
            proc = processes(taken.pid)
            self._post(lambda: self._take(taken, proc))

    def moved(self, trainer: int) -> None:
        """Remove what was taken of a trainer: it moves again."""
        if self._work is not None:
            self._post(lambda: self._remove(trainer))

    def conclude(self, verdict: Verdict, stalls: Mapping[str, Stall]) -> None:
        """Write what was found, and from what. For the leader's node."""
        if self._folder is not None:
            self._post(lambda: self._conclude(verdict, stalls))

    def flush(self, patience: float) -> bool:
        """Wait until all is written, at most `patience` seconds; return whether it is. For the end: a loss is told."""
        if self._work is None:
            return True
        written = threading.Event()
        self._work.put(written.set)
        if written.wait(patience):
            return True
        self._fail(f"what was to be kept there could not be written within {patience:g} s")
        return False

    def _post(self, work: Callable[[], None]) -> None:
        with self._lock:
            if self._work is None:
                self._work = queue.SimpleQueue()
                threads.start(self._run, self._work, name=f"evidence-{self._slot}", edge=threads.Edge.AGAIN)
            if self._work.qsize() < WAITING:
                self._work.put(work)
                return
        self._fail(f"{WAITING} writes wait for it, and no more are begun")

    # The thread's own.

    def _run(self, work: queue.SimpleQueue[Callable[[], None]]) -> None:
        while True:
            work.get()()

    def _take(self, taken: Taken, proc: str) -> None:
        files: dict[str, bytes] = {
            "stall.json": _json(to_json(taken.stall)),
            "record.bin": taken.page,
            "stacks.txt": taken.stacks.encode(),
            "program.txt": _program(taken.page).encode(),
            "proc.txt": proc.encode(),
        }
        path = self._write(taken.generation, taken.stall.step, f"slot{self._slot}", files)
        if path is not None:
            self._taken[taken.trainer] = path

    def _remove(self, trainer: int) -> None:
        path = self._taken.pop(trainer, None)
        if path is not None:
            shutil.rmtree(path, ignore_errors=True)
            # Another slot, or a verdict, may have something there.
            with contextlib.suppress(OSError):
                path.parent.rmdir()

    def _conclude(self, verdict: Verdict, stalls: Mapping[str, Stall]) -> None:
        files = {
            VERDICT: _json({"schema": SCHEMA, **to_json(verdict)}),
            STALLS: _json({"schema": SCHEMA, "stalls": to_json(dict(stalls))}),
            WAITS: "".join(f"{line}\n" for line in verdict.waits).encode(),
        }
        self._write(verdict.key, verdict.step, "", files)

    def _write(self, key: str, step: int, part: str, files: Mapping[str, bytes]) -> Path | None:
        """Return where it was written, be it only in part; None where nothing was."""
        assert self._folder is not None
        path = unfinished = None
        try:
            present = sorted(self._folder.glob(f"{key}-*-stuck-{self._node}"))
            path = (present[0] if present else self._folder / f"{key}-{step}-stuck-{self._node}") / part
            own = sum(_size(bundle) for bundle in self._folder.glob(f"*-stuck-{self._node}"))
            more = sum(map(len, files.values())) - (_size(path) if part else 0)
            if own + more > self._limit:
                raise OSError(f"evidence of {self._node} would take more than {self._limit} bytes; delete old bundles")
            path.mkdir(parents=True, exist_ok=True)
            for name, data in files.items():
                if data:
                    unfinished = path / f"{name}.part"
                    unfinished.write_bytes(data)
                    os.replace(unfinished, path / name)
        except OSError as error:
            if unfinished is not None:
                with contextlib.suppress(OSError):
                    unfinished.unlink()
            self._fail(str(error))
            return path if unfinished is not None else None
        self._failing = False
        return path

    def _fail(self, why: str) -> None:
        with self._lock:
            known, self._failing = self._failing, True
        if not known:
            self._failed(f"{self._folder}: {why}")


_PLAIN = ("at", "rounds")


def _program(page: bytes) -> str:
    """Return the operations of the present step and of the one before, and what the last steps took, for people."""
    said = []
    for title, program in zip(("present step", "last step"), programs(page), strict=True):
        said.append(f"{title}: {len(program)} operations\n")
        said += [f"  {axis} {mark:x}\n" for axis, mark in program]
    for step, numbers in steps(page):
        times = ", ".join(
            f"{name} {time / 1e6:.1f} ms" for name, time in numbers.items() if time and name not in _PLAIN
        )
        said.append(f"step {step}: {numbers['rounds']} forward passes; {times}\n")
    return "".join(said)


def processes(pid: int) -> str:
    """Return what the kernel says of a process and each of its threads; "" if it is gone.

    Only files that can be read while a process is blocked in the kernel or holds its own memory's lock.
    """
    said = []
    for name in ("status", "io"):
        text = read_proc(f"/proc/{pid}/{name}")
        if text:
            said.append(f"{name} of {pid}\n{text}")
    try:
        threads_ids: Iterable[str] = sorted(os.listdir(f"/proc/{pid}/task"), key=int)[:THREADS]
    except OSError:
        threads_ids = ()
    for thread in threads_ids:
        at = f"/proc/{pid}/task/{thread}"
        state = stat_fields(f"{pid}/task/{thread}")[:1]
        words = {
            "name": read_proc(f"{at}/comm"),
            "state": "".join(state),
            "wchan": read_proc(f"{at}/wchan"),
            "syscall": read_proc(f"{at}/syscall"),
        }
        said.append(f"thread {thread}: " + ", ".join(f"{name} {text.strip() or '?'}" for name, text in words.items()))
        kernel = read_proc(f"{at}/stack")
        if kernel:
            said.append(kernel)
    return "\n".join(text.rstrip() for text in said) + "\n" if said else ""


def _size(path: Path) -> int:
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(folder, name)).st_size
    return total


def _json(data: object) -> bytes:
    return json.dumps(data, indent=2).encode() + b"\n"

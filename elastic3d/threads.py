"""The edge of every background thread: exceptions are reported there, with the consequence that its starter chose.

A thread that dies of an unexpected exception no longer does its work for the others - checkpoints, heartbeats,
deliveries - while the process looks alive. So every thread of elastic3d is started by `start`, where the caller says
what its end would mean.
"""

from __future__ import annotations

import os
import threading
import traceback
from collections.abc import Callable
from concurrent.futures.thread import _threads_queues
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from elastic3d.clock import SYSTEM

EXIT_CODE = 70
"""Exit code of a process that cannot go on without one of its threads: EX_SOFTWARE of sysexits."""

SHORTEST, LONGEST = 0.1, 5.0
"""Seconds between a failure and the next try: doubled with each failure in a row, up to the longer one."""

CALM = 60.0
"""Seconds without a failure after which the next one counts as the first."""


class Edge(StrEnum):
    """The consequence of an exception that reaches the edge of a thread; the values are words for people.

    AGAIN: the work is called again, after a pause. ALONE: the thread ends, and only what it served with it. PROCESS:
    the process ends at once, because others can see that, but not that it does less than it should.
    """

    AGAIN = "it goes on"
    ALONE = "what it served ends with it"
    PROCESS = "this process ends"


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadFailure:
    """An exception reached the edge of a thread.

    thread: its name. error: class and message. traceback: formatted. edge: what follows. times: failures in a row.
    """

    thread: str
    error: str
    traceback: str
    edge: Edge
    times: int


Report = Callable[[ThreadFailure], None]


def _report_on_stderr(failure: ThreadFailure) -> None:
    from elastic3d import log, output  # they have threads themselves

    log.process_log().emit("thread.failed", **fields(failure))
    if failure.edge is Edge.PROCESS:
        output.flush(1.0)


_report: Report = _report_on_stderr
_end: Callable[[int], Any] = os._exit


def fields(failure: ThreadFailure) -> dict[str, object]:
    """Return the fields of event `thread.failed`."""
    return {
        "thread": failure.thread,
        "error": failure.error,
        "traceback": failure.traceback,
        "consequence": str(failure.edge),
        "times": failure.times,
    }


def report_to(report: Report | None, *, end: Callable[[int], Any] = os._exit) -> None:
    """Have failures of this process's threads reported to `report`, None for stderr only.

    Like `threading.excepthook` there is only one, since threads outlive and outnumber the code that started them.
    `report` is called on the thread that failed, and must have written everything when it returns: the process may end
    then. end: ends the process.
    """
    global _report, _end
    _report, _end = report or _report_on_stderr, end


def start(
    work: Callable[..., object],
    *args: Any,
    name: str,
    edge: Edge = Edge.PROCESS,
    failed: Callable[[BaseException], None] | None = None,
) -> threading.Thread:
    """Call `work` on a daemon thread of this name and return it.

    failed: called on the thread after a failure was reported, to tell those that wait for it or to repair its state
    before the work is called again; if it raises itself, the process ends.
    """
    thread = threading.Thread(target=_run, args=(work, args, name, edge, failed), name=name, daemon=True)
    thread.start()
    return thread


def forget_pools() -> None:
    """Have this process end without the pools that its daemon threads began.

    Nobody waits for a daemon thread; but the end of an interpreter waits for the threads of each pool of
    concurrent.futures, which may wait for ever for what does not answer.
    """
    for thread in list(_threads_queues):
        if thread.daemon:
            del _threads_queues[thread]  # type: ignore[attr-defined]  # typeshed has nobody change it


def _run(
    work: Callable[..., object],
    args: tuple[Any, ...],
    name: str,
    edge: Edge,
    failed: Callable[[BaseException], None] | None,
) -> None:
    times, failed_at = 0, 0.0
    while True:
        try:
            work(*args)
            return
        except BaseException as error:  # noqa: BLE001  # the one edge of all threads: see the module
            now = SYSTEM.monotonic()
            times = times + 1 if now - failed_at < CALM else 1
            failed_at = now
            if _reported(error, name, edge, times) and failed is not None:
                _recovered(failed, error, name)
        if edge is not Edge.AGAIN:
            return
        SYSTEM.sleep(min(LONGEST, SHORTEST * 2 ** min(times - 1, 16)))


def _reported(error: BaseException, name: str, edge: Edge, times: int) -> bool:
    """Report a failure, of many in a row the 1st, 2nd, 4th, 8th...; return False if the process was to end."""
    text = "".join(traceback.format_exception(error))
    failure = ThreadFailure(
        thread=name, error=f"{type(error).__name__}: {error}", traceback=text, edge=edge, times=times
    )
    if times & (times - 1) == 0:
        try:
            _report(failure)
        except BaseException:  # noqa: BLE001  # however the report fails, the failure itself must not be lost
            _report_on_stderr(failure)
    if edge is Edge.PROCESS:
        _end(EXIT_CODE)
        return False
    return True


def _recovered(failed: Callable[[BaseException], None], error: BaseException, name: str) -> None:
    try:
        failed(error)
    except BaseException as another:  # noqa: BLE001  # nobody would hear that the thread is gone
        _reported(another, name, Edge.PROCESS, 1)

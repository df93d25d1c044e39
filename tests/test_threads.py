"""Every background thread reports its failure at its edge, and then goes on, ends alone, or ends the process."""

from __future__ import annotations

import ast
import os
import queue
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from elastic3d import threads
from elastic3d.threads import Edge, ThreadFailure
from tests.paths import ROOT


def test_work_that_fails_is_called_again(reported: queue.SimpleQueue[ThreadFailure]) -> None:
    """After the failure is reported and the owner has put its state in order; reports number failures in a row."""
    tries: list[str] = []
    done = threading.Event()

    def work(word: str) -> None:
        tries.append(word)
        if tries.count("w") < 3:
            raise KeyError(tries.count("w"))
        done.set()

    thread = threads.start(
        work, "w", name="worker", edge=Edge.AGAIN, failed=lambda error: tries.append(type(error).__name__)
    )
    assert done.wait(30)
    thread.join(30)
    assert not thread.is_alive()
    assert tries == ["w", "KeyError", "w", "KeyError", "w"]
    first, second = reported.get(timeout=10), reported.get(timeout=10)
    assert (first.thread, first.error, first.times, second.times) == ("worker", "KeyError: 1", 1, 2)
    assert "raise KeyError" in first.traceback
    assert first.edge is Edge.AGAIN


def test_a_thread_that_fails_alone_notifies_its_waiter(reported: queue.SimpleQueue[ThreadFailure]) -> None:
    """Once; other threads go on."""
    failures: queue.SimpleQueue[BaseException] = queue.SimpleQueue()

    def work() -> None:
        raise SystemExit(3)

    threads.start(work, name="one", edge=Edge.ALONE, failed=failures.put).join(30)
    assert isinstance(failures.get(timeout=10), SystemExit)
    assert reported.get(timeout=10).edge is Edge.ALONE


def test_a_failing_report_is_written_to_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    """Nothing it was to report is lost."""

    def broken(failure: ThreadFailure) -> None:
        raise OSError("the report")

    def work() -> None:
        raise KeyError("the failure")

    threads.report_to(broken)
    try:
        threads.start(work, name="one", edge=Edge.ALONE).join(30)
    finally:
        threads.report_to(None)
    assert "KeyError: 'the failure'" in capfd.readouterr().err


ENDS = """
import sys, time
from elastic3d import threads
from elastic3d.worker.journal import Journal

if len(sys.argv) > 1:
    threads.report_to(Journal(sys.argv[1], "run", "node").thread_failed)

def work():
    raise KeyError("nobody foresaw this")

threads.start(work, name="needed")
time.sleep(600)
"""


@pytest.mark.parametrize("journal", [True, False])
def test_a_process_does_not_outlive_a_thread_it_needs(journal: bool, tmp_path: Path) -> None:
    """It ends at once and says why: on stderr with the traceback, and in the event file if there is one."""
    arguments = [str(tmp_path)] if journal else []
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", ENDS, *arguments], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == threads.EXIT_CODE
    assert "thread.failed thread=needed" in done.stderr
    assert "consequence=this process ends" in done.stderr
    assert 'raise KeyError("nobody foresaw this")' in done.stderr or "KeyError: 'nobody foresaw this'" in done.stderr
    if journal:
        assert '"event":"thread.failed"' in (tmp_path / "node-0.jsonl").read_text()


BARE = ("Thread", "Timer", "start_new_thread")


def test_no_thread_is_started_without_an_edge() -> None:
    """threading.Thread and its like are called in one place; pools pass exceptions to whoever asks for the result.

    What writes events has none of elastic3d's modules, and its thread only ends the process.
    """
    wrong = []
    for path in sorted((ROOT / "elastic3d").rglob("*.py")):
        if path in (ROOT / "elastic3d" / "threads.py", ROOT / "elastic3d" / "event_file.py"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                if called in BARE:
                    wrong.append(f"{path.relative_to(ROOT)}:{node.lineno} calls {called}; use elastic3d.threads.start")
    assert not wrong, "\n".join(wrong)

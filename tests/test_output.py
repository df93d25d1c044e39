"""Writers of logs never wait for a reader, and outlive it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

from elastic3d.output import LineWriter
from tests.paths import ROOT

ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT)}


def test_lines_beyond_the_queue_limit_are_dropped_and_counted() -> None:
    """While a write hangs lines queue up to a limit; the writer learns how many were lost, and goes on."""
    gate, begun = threading.Event(), threading.Event()
    written: list[bytes | int] = []

    def write(line: bytes) -> None:
        begun.set()
        gate.wait(30)
        written.append(line)

    writer = LineWriter(write, name="slow", missed=written.append, most_lines=3)
    assert writer.put(b"0")
    assert begun.wait(30)
    assert [writer.put(b"%d" % n) for n in range(1, 8)] == [True, True, True, False, False, False, False]
    assert not writer.flush(0.0)
    gate.set()
    assert writer.flush(30)
    assert writer.put(b"8")
    assert writer.close(30)
    assert not writer.put(b"9")
    assert written == [b"0", 4, b"1", b"2", b"3", b"8"]


def test_the_report_of_dropped_lines_is_never_dropped() -> None:
    """It appears where they are missing, although other lines have filled the queue again by then."""
    gate, begun = threading.Event(), threading.Event()
    written: list[bytes] = []

    def write(line: bytes) -> None:
        begun.set()
        gate.wait(30)
        written.append(line)

    def fill() -> None:
        while writer.put(b"more"):
            pass

    def missed(count: int) -> None:
        if b"missed" not in written:
            filling = threading.Thread(target=fill)
            filling.start()
            filling.join()
            assert writer.put(b"missed")

    writer = LineWriter(write, name="slow", missed=missed, most_lines=3)
    assert writer.put(b"0")
    assert begun.wait(30)
    fill()
    gate.set()
    assert writer.close(30)
    assert written[:3] == [b"0", b"missed", b"more"]


HUNG = """
import os, sys, time
from elastic3d.membership import events as m
from elastic3d.worker.journal import Journal

journal = Journal(sys.argv[1], "run", "node")
from elastic3d import output
output.unblock()
begun = time.monotonic()
for number in range(5_000):
    journal.emit("peer.lost", peer="x" * 50, evidence="refuses")
open(sys.argv[2], "w").write(str(time.monotonic() - begun))
os._exit(0)
"""


def test_a_stopped_log_reader_and_a_hung_disk_hold_nobody_up(tmp_path: Path) -> None:
    """stderr is a full pipe and the event file is where every write hangs: callers go on.

    Writes to a pipe that nobody reads block like those to a file server that hangs.
    """
    folder = tmp_path / "events"
    folder.mkdir()
    os.mkfifo(folder / "node-0.jsonl")
    events = os.open(folder / "node-0.jsonl", os.O_RDONLY | os.O_NONBLOCK)
    reading, writing = os.pipe()
    done = tmp_path / "done"
    try:
        child = subprocess.Popen([sys.executable, "-c", HUNG, str(folder), str(done)], env=ENVIRONMENT, stderr=writing)
        # Without that it would wait for ever for either reader.
        assert child.wait(timeout=60) == 0
    finally:
        for descriptor in (events, reading, writing):
            os.close(descriptor)
    assert done.exists()


DROPPED = """
import os, sys, threading
from elastic3d.log import EventLog

path = sys.argv[1]
with EventLog(path, node="n0") as log:
    reader = os.open(path, os.O_RDONLY)
    for step in range(25_000):
        log.emit("snapshot.held", step=step)
    with os.fdopen(reader) as file, open(sys.argv[2], "w") as out:
        reading = threading.Thread(target=lambda: out.writelines(file))
        reading.start()
        log.flush(60)
        log.emit("snapshot.held", step=-1)
        log.close(60)
        reading.join(60)
"""


def test_dropped_events_are_reported_as_an_event(tmp_path: Path) -> None:
    """Once there is room again, the file says how many are missing at that point."""
    path, out = tmp_path / "n0-0.jsonl", tmp_path / "out"
    os.mkfifo(path)
    keep_open = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        subprocess.run([sys.executable, "-c", DROPPED, str(path), str(out)], env=ENVIRONMENT, timeout=90, check=True)
    finally:
        os.close(keep_open)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    missing = sum(line["count"] for line in lines if line["event"] == "events.dropped")
    assert missing > 0
    assert missing + sum(line["event"] == "snapshot.held" for line in lines) == 25_001


DEAF = """
import sys
from elastic3d import output

output.survive_readers()
sys.stdin.readline()
for number in range(10_000):
    print("words", number, flush=True)
    print("words", number, file=sys.stderr, flush=True)
    output.say("more words")
output.unblock()
output.say("and more")
output.flush(10)
sys.exit(7)
"""


def test_a_dead_log_reader_does_no_harm() -> None:
    """What is printed to a broken pipe is lost without an error, while the script runs and when it ends."""
    child = subprocess.Popen(
        [sys.executable, "-c", DEAF],
        env=ENVIRONMENT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    assert child.stderr is not None
    child.stdout.close()
    child.stderr.close()
    child.stdin.write(b"go\n")
    child.stdin.close()
    assert child.wait(timeout=60) == 7


def test_a_full_disk_behind_stderr_does_no_harm() -> None:
    """As under `> /some/disk 2>&1` when that disk fills up."""
    with open("/dev/full", "wb") as full:
        child = subprocess.Popen(
            [sys.executable, "-c", DEAF], env=ENVIRONMENT, stdin=subprocess.PIPE, stdout=full, stderr=full
        )
        child.communicate(b"go\n", timeout=60)
    assert child.returncode == 7

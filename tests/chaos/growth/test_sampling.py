"""What is read of real processes and folders, and the series made of it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from chaos.growth.measures import MB, measures
from chaos.growth.sampling import EtcdSample, FolderSample, ProcessSample, Sample, etcd_sample, folder, process
from chaos.servers.etcd import EtcdServer

OBEYS = """
import sys
for line in sys.stdin:
    exec(line)
    print(flush=True)
"""


class Other:
    """A process that holds nothing but what a test tells it to: this one has other tests' threads and files."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def do(self, line: str) -> None:
        """Have it run a line of Python."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == "\n"

    def sample(self) -> ProcessSample:
        sample = process(self._process.pid, "keeper", "node0")
        assert sample is not None
        assert (sample.kind, sample.node, sample.pid) == ("keeper", "node0", self._process.pid)
        return sample


@pytest.fixture
def other() -> Iterator[Other]:
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-S", "-c", OBEYS], **pipes) as process:
        yield Other(process)
        process.kill()


def test_memory_of_a_process_is_seen(other: Other) -> None:
    """Pages count once they are written."""
    other.do("import mmap, os")
    before = other.sample()
    # Pages of its own: those of an object may come from what the process has freed, and still holds.
    other.do("held = mmap.mmap(-1, 40 << 20); held.write(os.urandom(1 << 20) * 40)")
    after = other.sample()
    assert after.memory - before.memory > 0.9 * (40 << 20)
    assert after.held - before.held > 0.9 * (40 << 20)


def test_descriptors_and_threads_of_a_process_are_seen(other: Other) -> None:
    """Each of them."""
    other.do("import os, threading")
    before = other.sample()
    other.do("opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(7)]")
    other.do("for _ in range(3): threading.Thread(target=threading.Event().wait).start()")
    after = other.sample()
    assert after.descriptors - before.descriptors == 7
    assert after.threads - before.threads == 3


def test_a_process_that_has_ended_is_no_sample() -> None:
    """Whether it was reaped or not."""
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
        assert process(ended.pid, "trainer") is None
    assert process(ended.pid, "trainer") is None


def test_folders_are_counted(tmp_path: Path) -> None:
    """With all below them; one that is not there is empty."""
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "one").write_bytes(b"x" * 10)
    (tmp_path / "a" / "b" / "two").write_bytes(b"x" * 5)
    assert folder(tmp_path) == FolderSample(files=2, bytes=15)
    assert folder(tmp_path / "none") == FolderSample(files=0, bytes=0)


@pytest.mark.etcd
def test_keys_of_a_run_are_counted_by_prefix() -> None:
    """Those of earlier generations apart; nothing is said while etcd stands."""
    with EtcdServer() as etcd, etcd.client() as client:
        for key in ("board/leader", "roll/members/a", "roll/members/b", "history/1/node0"):
            client.put(f"/elastic3d/x/{key}", b"12")
        client.put("/elastic3d/y/board/leader", b"12")
        sample = etcd_sample(etcd, client, "/elastic3d/x/")
        etcd.pause()
        away = etcd_sample(etcd, client, "/elastic3d/x/")
        etcd.resume()
    assert away is None
    assert sample is not None
    assert sample.keys == {"board": 1, "roll/members": 2}
    assert sample.past == 1
    assert sample.database > 0


def samples(leak: float, *, minutes: int = 20) -> Sequence[Sample]:
    """Return a made-up soak: node0 stays, node1 is another process each minute. leak: bytes a minute of node0."""
    return [
        Sample(
            at=5.0 * at,
            step=10 * at,
            generation=1 + at // 12,
            processes=(
                ProcessSample(
                    kind="keeper",
                    node="node0",
                    pid=1,
                    memory=40 * MB,
                    held=int(90 * MB + leak * at / 12),
                    descriptors=60,
                    threads=30,
                ),
                ProcessSample(
                    kind="keeper",
                    node="node1",
                    pid=2 + at // 12,
                    memory=80 * MB,
                    held=90 * MB,
                    descriptors=60,
                    threads=30,
                ),
            ),
            etcd=EtcdSample(keys={"board": 4}, past=1 + at // 12, bytes=900, database=40_000, in_use=30_000),
            store=FolderSample(files=12, bytes=1_000_000),
            events=FolderSample(files=1 + at // 12, bytes=3000 * at),
        )
        for at in range(12 * minutes)
    ]


def test_only_processes_that_last_are_looked_at_one_by_one() -> None:
    """Those before the first step and those that came later are not."""
    names = {measure.name for measure in measures(samples(0.0)) if measure.group.name.endswith("lasting processes")}
    assert names == {"node0 keeper"}


def test_a_leak_is_found_and_what_grows_by_design_is_not() -> None:
    """Events, and keys of the past, of which there are so many at most."""
    assert not [measure for measure in measures(samples(0.0)) if measure.grows]
    grown = [measure for measure in measures(samples(MB)) if measure.grows]
    assert [(measure.group.name, measure.name) for measure in grown] == [
        ("memory of lasting processes", "node0 keeper")
    ]


def test_a_soak_without_a_step_has_no_series() -> None:
    """There is nothing to say."""
    assert measures([Sample(at=1.0, step=0, generation=0)]) == ()

"""A file of which writes are not answered, or fail, for a while: real FUSE, as writers and a reader meet it."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from chaos.machine.small_disk import SmallDisk
from chaos.machine.spoilt_file import SpoiltFile
from elastic3d.health.processes import stat_fields
from tests.paths import ROOT
from tests.worker.keepers import eventually

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def file(tmp_path: Path) -> Iterator[SpoiltFile]:
    try:
        with SpoiltFile(tmp_path / "spoilt", tmp_path / "kept.jsonl") as file:
            yield file
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOENT):
            raise
        pytest.skip(f"no FUSE file system can be mounted here: {error}")


def appends(file: SpoiltFile, *lines: str) -> subprocess.Popen[bytes]:
    """Return a process that appends lines, each by one write."""
    code = "import os, sys; f = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND | os.O_CREAT)\n"
    code += "for line in sys.argv[2:]: os.write(f, line.encode())"
    return subprocess.Popen([sys.executable, "-S", "-c", code, str(file.path), *lines])


def devices() -> int:
    """Return how many of this process's descriptors are of a FUSE file system."""
    return [os.path.realpath(path) for path in Path("/proc/self/fd").iterdir()].count("/dev/fuse")


def test_what_is_written_is_there_at_once_and_stays(file: SpoiltFile, tmp_path: Path) -> None:
    """Lines longer than the kernel writes at once are whole; another writer goes on at the end."""
    long = "x" * 100_000
    assert appends(file, "one\n", f"{long}\n").wait(30) == 0
    assert file.path.read_text() == f"one\n{long}\n"
    assert appends(file, "two\n").wait(30) == 0
    assert (tmp_path / "kept.jsonl").read_text() == file.path.read_text() == f"one\n{long}\ntwo\n"
    assert file.path.stat().st_size == 100_009


def test_a_write_waits_while_it_hangs_and_arrives_then(file: SpoiltFile) -> None:
    """It can be read meanwhile, by who opens and closes it, and SIGKILL does not end the writer."""
    assert appends(file, "before\n").wait(30) == 0
    file.hang()
    writer, other = appends(file, "held\n", "lost\n"), appends(file, "held\n")
    try:
        assert eventually(lambda: file.held == 2, 30)
        assert file.path.read_text() == "before\n"
        writer.kill()
        assert eventually(lambda: stat_fields(writer.pid)[:1] == ["D"], 30)
        assert (writer.poll(), other.poll()) == (None, None)
    finally:
        file.restore()
    assert writer.wait(30) == -signal.SIGKILL
    assert other.wait(30) == 0
    assert file.path.read_text() == "before\nheld\nheld\n"


def test_writes_fail_while_it_is_gone(file: SpoiltFile) -> None:
    """Also through a file that is open, and no longer than that."""
    writing = os.open(file.path, os.O_WRONLY | os.O_APPEND)
    os.write(writing, b"before\n")
    file.refuse()
    with pytest.raises(OSError, match="Input/output error"):
        os.write(writing, b"lost\n")
    assert file.path.read_text() == "before\n"
    file.restore()
    os.write(writing, b"after\n")
    os.close(writing)
    assert file.path.read_text() == "before\nafter\n"


def test_a_full_disk_below_it_is_told(tmp_path: Path) -> None:
    """As the writer of a file there would be."""
    try:
        with SmallDisk(tmp_path / "disk") as disk, SpoiltFile(tmp_path / "spoilt", disk.folder / "kept") as file:
            writing = os.open(file.path, os.O_WRONLY | os.O_APPEND)
            disk.fill()
            # What is left of the last page is taken yet.
            assert os.write(writing, bytes(1 << 14)) < 1 << 13
            with pytest.raises(OSError, match="No space left"):
                os.write(writing, b"lost\n")
            os.close(writing)
    except OSError as error:
        pytest.skip(f"no such file systems can be mounted here: {error}")


def test_nothing_is_left_of_it_but_its_bytes(file: SpoiltFile, tmp_path: Path) -> None:
    """Its mount is gone though a write waits, which arrives, and who has it open is told."""
    with SpoiltFile(tmp_path / "second", tmp_path / "other") as second:
        writing = os.open(second.path, os.O_WRONLY | os.O_APPEND)
        second.hang()
        writer = appends(second, "held\n")
        assert eventually(lambda: second.held == 1, 30)
    assert writer.wait(30) == 0
    assert not (tmp_path / "second").exists()
    assert str(tmp_path / "second") not in Path("/proc/self/mounts").read_text()
    assert (tmp_path / "other").read_text() == "held\n"
    with pytest.raises(OSError, match=r"not connected|Software caused connection abort|No such device"):
        os.write(writing, b"more\n")
    with pytest.raises(OSError, match="not connected"):
        os.close(writing)


STARTS = """
import os, subprocess, sys
from pathlib import Path
from chaos.machine.spoilt_file import SpoiltFile

with SpoiltFile(Path("spoilt"), Path("kept")) as file, file.path.open("a"):
    subprocess.run([sys.executable, "-S", "-c", ""])
"""


@pytest.mark.usefixtures("file")
def test_who_serves_a_file_and_has_it_open_can_start_processes(tmp_path: Path) -> None:
    """Whatever these close before they begin, of which it is asked."""
    folder = tmp_path / "other"
    folder.mkdir()
    process = subprocess.Popen([sys.executable, "-c", STARTS], cwd=folder, env=os.environ | {"PYTHONPATH": str(ROOT)})
    try:
        assert process.wait(30) == 0
    except subprocess.TimeoutExpired:
        # Nothing else ends it.
        subprocess.run(["umount", "--force", folder / "spoilt"], check=True)
        raise


@pytest.mark.usefixtures("file")
def test_nothing_is_mounted_where_no_thread_can_serve_it(tmp_path: Path) -> None:
    """As where a limit of threads is reached; it can be tried again."""
    second = SpoiltFile(tmp_path / "second", tmp_path / "other")
    before = threading.stack_size(1 << 60)
    try:
        with pytest.raises(RuntimeError, match="can't start new thread"):
            second.__enter__()
    finally:
        threading.stack_size(before)
    assert str(second.folder) not in Path("/proc/self/mounts").read_text()
    assert eventually(lambda: devices() == 1, 30), "that of the other one"
    with second:
        assert appends(second, "one\n").wait(30) == 0

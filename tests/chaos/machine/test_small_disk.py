"""A file system of its own, which is full or read-only for a while: real tmpfs, as a writer meets it."""

from __future__ import annotations

from pathlib import Path

import pytest

from chaos.machine.small_disk import SmallDisk


def test_a_full_one_takes_no_byte_and_gives_what_it_has(disk: SmallDisk) -> None:
    """Also through a file that is open; what is there is read, and there is room again afterwards."""
    file = disk.folder / "file"
    file.write_bytes(b"whole" * 1000)
    with file.open("ab", buffering=0) as open_one:
        disk.fill()
        # What is left of the last page is taken yet.
        written = open_one.write(bytes(1 << 16))
        assert written < 1 << 12
        with pytest.raises(OSError, match="No space left"):
            open_one.write(b"more")
        assert file.read_bytes().startswith(b"whole" * 1000)
        disk.restore()
        assert open_one.write(bytes(1 << 16)) == 1 << 16


def test_a_read_only_one_takes_no_file(disk: SmallDisk) -> None:
    """It cannot become so while a file is open to be written."""
    with (disk.folder / "file").open("wb"):
        assert not disk.protect()
    assert disk.protect()
    with pytest.raises(OSError, match="Read-only"):
        (disk.folder / "other").touch()
    disk.restore()
    (disk.folder / "other").touch()


def test_nothing_is_left_of_it(tmp_path: Path, disk: SmallDisk) -> None:
    """Its mount is gone, also while it is full."""
    with SmallDisk(tmp_path / "second") as second:
        (second.folder / "file").write_bytes(bytes(5000))
        second.fill()
    assert str(tmp_path / "second") not in Path("/proc/self/mounts").read_text()

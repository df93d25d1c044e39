"""What is kept of ranks that stand still: before anything is done to them, within bounds, and never in the way."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from chaos.machine.processes import wait_until
from elastic3d.health.evidence import WAITING, EvidenceWriter, processes
from elastic3d.health.record import SIZE
from elastic3d.health.stuck import judge
from elastic3d.health.watch import Taken
from elastic3d.membership.stalls import RankStall, RankState, Verdict
from elastic3d.values import Layout, from_json
from tests.health.standstill import STEPS, generation, program, stalls, standstill, with_rank

LAYOUT = Layout(pp=2, dp=2)
PAGE = bytes(SIZE)


def taken(rank: RankStall, pid: int, *, trainer: int = 7, key: str = "4.1", stacks: str = "") -> Taken:
    return Taken(trainer=trainer, generation=key, pid=pid, stall=rank, page=PAGE, stacks=stacks)


@pytest.fixture
def ranks() -> dict[int, RankStall]:
    steps = {rank: [program(LAYOUT, rank) for _ in range(STEPS)] for rank in range(4)}
    return with_rank(standstill(LAYOUT, steps, {1: 12}), 1, state=RankState.STOPPED)


@pytest.fixture
def stopped() -> Iterator[int]:
    """Run a process that somebody has stopped."""
    process = subprocess.Popen([sys.executable, "-c", "import time; print(flush=True); time.sleep(600)"], stdout=-1)
    assert process.stdout is not None
    process.stdout.readline()
    os.kill(process.pid, signal.SIGSTOP)
    assert wait_until(lambda: "state T" in processes(process.pid), 30)
    yield process.pid
    process.kill()
    process.wait()
    process.stdout.close()


def test_a_bundle_holds_what_each_slot_took_and_what_was_found(
    tmp_path: Path, ranks: dict[int, RankStall], stopped: int
) -> None:
    """Two slots of a node and its verdict share one folder, whatever steps they were at."""
    whole = generation(LAYOUT)
    said = stalls(whole, ranks)
    verdict = judge(whole, said, 0.0)
    assert verdict is not None
    for slot in range(2):
        writer = EvidenceWriter(str(tmp_path), "n1", slot, limit=1 << 20)
        writer.take(taken(ranks[slot], stopped, stacks="Thread 0x1\n"))
        assert writer.flush(30)
    writer.conclude(verdict, said)
    assert writer.flush(30)
    (bundle,) = (tmp_path / "evidence").iterdir()
    assert bundle.name == f"4.1-{ranks[0].step}-stuck-n1"
    assert sorted(path.name for path in bundle.iterdir()) == [
        "slot0", "slot1", "stalls.json", "verdict.json", "waits.txt",
    ]  # fmt: skip
    assert from_json(Verdict, json.loads((bundle / "verdict.json").read_text())) == verdict
    assert (bundle / "slot1" / "record.bin").read_bytes() == PAGE
    assert f"thread {stopped}: name" in (bundle / "slot1" / "proc.txt").read_text()


def test_what_was_taken_of_a_rank_that_moves_again_is_removed(tmp_path: Path, ranks: dict[int, RankStall]) -> None:
    """A long pause leaves nothing; what another slot took stays."""
    writers = [EvidenceWriter(str(tmp_path), "n1", slot, limit=1 << 20) for slot in range(2)]
    for writer in writers:
        writer.take(taken(ranks[0], os.getpid()))
        assert writer.flush(30)
    writers[0].moved(7)
    assert writers[0].flush(30)
    (bundle,) = (tmp_path / "evidence").iterdir()
    assert [path.name for path in bundle.iterdir()] == ["slot1"]
    writers[1].moved(7)
    assert writers[1].flush(30)
    assert not list((tmp_path / "evidence").iterdir())


def test_a_bound_and_a_folder_that_cannot_be_written_are_told_once(tmp_path: Path, ranks: dict[int, RankStall]) -> None:
    """Evidence is lost then, and nothing else."""
    errors: list[str] = []
    writer = EvidenceWriter(str(tmp_path), "n1", 0, limit=SIZE * 3 // 2, failed=errors.append)
    for number in range(3):
        writer.take(taken(ranks[0], 0, trainer=number, key=f"{number}.0"))
    assert writer.flush(30)
    assert len(list((tmp_path / "evidence").iterdir())) == 1
    assert len(errors) == 1
    assert f"{SIZE * 3 // 2} bytes" in errors[0]
    blocked = tmp_path / "file"
    blocked.write_text("")
    lost: list[str] = []
    writer = EvidenceWriter(str(blocked), "n1", 0, limit=1 << 20, failed=lost.append)
    for _ in range(2):
        writer.take(taken(ranks[0], 0))
    assert writer.flush(30)
    assert len(lost) == 1
    nowhere = EvidenceWriter("", "n1", 0, limit=1 << 20, failed=lost.append)
    nowhere.take(taken(ranks[0], 0))
    assert nowhere.flush(30)
    assert len(lost) == 1


def test_a_disk_that_hangs_holds_nobody_up_and_takes_no_memory_for_ever(
    tmp_path: Path, ranks: dict[int, RankStall]
) -> None:
    """What waits for it is bounded, which is told once; it goes on where the disk does."""
    errors: list[str] = []
    writer = EvidenceWriter(str(tmp_path), "n1", 0, limit=1 << 24, failed=errors.append)
    hanging = tmp_path / "evidence" / f"4.1-{ranks[0].step}-stuck-n1" / "slot0" / "stall.json.part"
    hanging.parent.mkdir(parents=True)
    os.mkfifo(hanging)
    for _ in range(3 * WAITING):
        writer.take(taken(ranks[0], 0))
    assert not writer.flush(0.1)
    assert errors == [f"{tmp_path / 'evidence'}: {WAITING} writes wait for it, and no more are begun"]
    # Somebody reads what is written there, and the writer goes on.
    with hanging.open("rb") as read:
        assert read.read()
    assert writer.flush(30)
    writer.take(taken(ranks[1], 0, key="5.0"))
    assert writer.flush(30)
    assert list((tmp_path / "evidence").glob("5.0-*/slot0/stall.json"))
    assert len(errors) == 1


def test_what_a_disk_that_hangs_has_not_taken_at_the_end_is_told(tmp_path: Path, ranks: dict[int, RankStall]) -> None:
    """Nobody looks for it there then, and knows what holds the process where the kernel does."""
    errors: list[str] = []
    writer = EvidenceWriter(str(tmp_path), "n1", 0, limit=1 << 24, failed=errors.append)
    hanging = tmp_path / "evidence" / f"4.1-{ranks[0].step}-stuck-n1" / "slot0" / "stall.json.part"
    hanging.parent.mkdir(parents=True)
    os.mkfifo(hanging)
    writer.take(taken(ranks[0], 0))
    assert not writer.flush(0.1)
    assert errors == [f"{tmp_path / 'evidence'}: what was to be kept there could not be written within 0.1 s"]


def test_a_disk_that_is_full_keeps_what_fits_and_harms_nothing(tmp_path: Path, ranks: dict[int, RankStall]) -> None:
    """It is told once, nothing unfinished stays, and what was kept goes when the rank moves again."""
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32k", "none", small], check=False).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        errors: list[str] = []
        writer = EvidenceWriter(str(small), "n1", 0, limit=1 << 20, failed=errors.append)
        for _ in range(2):
            writer.take(taken(ranks[1], os.getpid()))
        assert writer.flush(30)
        assert len(errors) == 1
        assert "No space left" in errors[0]
        (kept,) = (small / "evidence").glob("*/slot0")
        assert [path.name for path in kept.iterdir()] == ["stall.json"]
        writer.moved(7)
        assert writer.flush(30)
        assert not list((small / "evidence").iterdir())
    finally:
        subprocess.run(["umount", small], check=True)


def test_a_trainer_that_ends_while_it_is_looked_at_leaves_what_was_known(
    tmp_path: Path, ranks: dict[int, RankStall]
) -> None:
    """Its record is kept, and that there is no process any more is no error."""
    process = subprocess.Popen([sys.executable, "-S", "-c", ""])
    process.wait()
    errors: list[str] = []
    writer = EvidenceWriter(str(tmp_path), "n1", 0, limit=1 << 20, failed=errors.append)
    writer.take(taken(ranks[1], process.pid))
    assert writer.flush(30)
    (kept,) = (tmp_path / "evidence").glob("*/slot0")
    assert sorted(path.name for path in kept.iterdir()) == ["program.txt", "record.bin", "stall.json"]
    assert errors == []


def test_a_folder_that_somebody_removes_is_made_again(tmp_path: Path, ranks: dict[int, RankStall]) -> None:
    """While the job runs; a file in its place is told, and what comes after it is gone is kept again."""
    errors: list[str] = []
    writer = EvidenceWriter(str(tmp_path / "events"), "n1", 0, limit=1 << 20, failed=errors.append)
    writer.take(taken(ranks[1], 0))
    assert writer.flush(30)
    shutil.rmtree(tmp_path / "events")
    writer.moved(7)
    writer.take(taken(ranks[1], 0, key="5.0"))
    assert writer.flush(30)
    assert list((tmp_path / "events" / "evidence").glob("5.0-*/slot0/record.bin"))
    assert errors == []
    shutil.rmtree(tmp_path / "events" / "evidence")
    (tmp_path / "events" / "evidence").write_text("")
    writer.take(taken(ranks[1], 0, key="6.0"))
    assert writer.flush(30)
    (tmp_path / "events" / "evidence").unlink()
    writer.take(taken(ranks[1], 0, key="7.0"))
    assert writer.flush(30)
    assert len(errors) == 1
    assert [path.name[:3] for path in (tmp_path / "events" / "evidence").iterdir()] == ["7.0"]

"""At the end what was done to a job is undone, as far as that can be, in seconds; what stands beside it is closed."""

from __future__ import annotations

import errno
import os
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from chaos.faults.etcd import EtcdFull, EtcdRestored
from chaos.faults.events import EventsFull, EventsHang
from chaos.faults.fault import Fault
from chaos.faults.moment import When
from chaos.faults.orders import Announce, Join
from chaos.machine.small_disk import SmallDisk
from chaos.machine.spoilt_file import SpoiltFile
from chaos.playing.play import Player, play
from chaos.playing.setting import Setting
from chaos.servers.etcd import EtcdServer
from chaos.servers.metadata import Provider
from elastic3d.clock import SYSTEM
from elastic3d.errors import EtcdUnavailable

pytestmark = [pytest.mark.etcd, pytest.mark.timeout(60)]


class Watched(Player):
    """A player of which is known whether it was closed."""

    closed = False

    def close(self) -> None:
        """Close it."""
        super().close()
        self.closed = True


def player(etcd: EtcdServer, folder: Path, *faults: Fault) -> Watched:
    """Return a player of a job that is not started."""
    return Watched(Setting(nodes=1), faults, etcd, folder, "undo", None, SYSTEM)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    """A file system of its own, where others can be mounted as well, of FUSE too."""
    try:
        with SmallDisk(tmp_path / "disk") as disk, SpoiltFile(tmp_path / "spoilt", tmp_path / "kept"):
            yield disk
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOENT):
            raise
        pytest.skip(f"no file system can be mounted here: {error}")


def mounted(folder: Path) -> bool:
    """Return whether there is a file system below a folder."""
    return f" {folder}/" in Path("/proc/self/mounts").read_text()


def test_an_etcd_that_is_gone_is_waited_for_no_longer(tmp_path: Path) -> None:
    """Nobody makes space in it; what else was done to the job is undone."""
    undone: list[str] = []
    with EtcdServer(quota=16 << 20) as etcd:
        job = player(etcd, tmp_path)
        assert EtcdFull(when=When(step=1)).make(job)
        etcd.kill()
        job.at_end(lambda: undone.append("the rest"))
        with job.undone():
            pass
    assert undone == ["the rest"]
    assert job.closed


def test_space_is_made_in_an_etcd_that_another_action_wakes(tmp_path: Path) -> None:
    """What waits for an etcd that serves is tried again after the others."""
    with EtcdServer(quota=16 << 20) as etcd:
        job = player(etcd, tmp_path)
        assert EtcdFull(when=When(step=1)).make(job)
        etcd.pause()
        job.at_end(etcd.resume)
        job.undo()
        with etcd.client() as client:
            client.put("a", b"1")


def test_a_backup_that_was_to_be_put_back_later_is_no_fault_of_a_job_that_has_ended(tmp_path: Path) -> None:
    """It was not made, nor is it at the end: what is left behind is told by etcd as it is."""
    fault = EtcdRestored(seconds=60.0, when=When(step=1))
    with EtcdServer() as etcd:
        job = player(etcd, tmp_path)
        assert fault.make(job)
        job.made, job.hit = [(fault, 1.0)], [""]
        with etcd.client() as client:
            client.put("since", b"1")
        with job.undone():
            pass
        with etcd.client() as client:
            assert client.get("since") is not None
    assert (job.made, job.hit, job.late) == ([], [], [fault])


def test_what_cannot_be_undone_keeps_nothing_else_from_it(tmp_path: Path) -> None:
    """It is said at the end; what ended the job before, such as Ctrl-C, comes first."""

    def fail() -> NoReturn:
        raise EtcdUnavailable("etcd does not come up")

    def interrupt() -> NoReturn:
        raise SystemExit(130)

    undone: list[str] = []
    with EtcdServer() as etcd:
        jobs = [player(etcd, tmp_path / name) for name in ("ended", "interrupted", "then")]
        for job in jobs:
            job.at_end(fail)
            job.at_end(lambda: undone.append("the rest"))
        with pytest.raises(EtcdUnavailable), jobs[0].undone():
            pass
        with pytest.raises(SystemExit) as asked, jobs[1].undone():
            interrupt()
        assert "etcd does not come up" in asked.value.__notes__[0]
        jobs[2].at_end(interrupt)
        with pytest.raises(SystemExit), jobs[2].undone():
            pass
    assert undone == ["the rest"] * 3
    assert all(job.closed for job in jobs)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may run before others")
def test_who_plays_a_job_runs_before_it_until_what_was_done_is_undone(tmp_path: Path) -> None:
    """Also where a longer history plays it in its own way."""
    before = os.sched_getscheduler(0)
    with EtcdServer() as etcd, player(etcd, tmp_path).undone():
        assert os.sched_getscheduler(0) == os.SCHED_RR | os.SCHED_RESET_ON_FORK
    assert os.sched_getscheduler(0) == before


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


OF_EVENTS = (EventsFull(seconds=1.0, when=When(step=1)), EventsHang(seconds=1.0, when=When(step=1)))


@pytest.mark.usefixtures("disk")
def test_what_nodes_wrote_to_disks_of_their_own_is_kept(tmp_path: Path) -> None:
    """Their events are files among the others' once the disks are gone."""
    with EtcdServer() as etcd:
        job = player(etcd, tmp_path / "job", *OF_EVENTS)
        path = job.follower.folder / "node0-0.jsonl"
        with job.undone():
            append(path, b"line\n")
            assert mounted(tmp_path / "job")
    assert not path.is_symlink()
    assert path.read_text() == "line\n"
    assert not mounted(tmp_path / "job")


@pytest.mark.usefixtures("disk")
def test_a_node_that_joins_has_such_a_disk_too(tmp_path: Path) -> None:
    """It may be the only one that neither leads nor has rank 0."""
    with EtcdServer() as etcd:
        job = player(etcd, tmp_path / "job", Join(when=When(step=1)), *OF_EVENTS)
        with job.undone():
            spoilt = [fault.spoil(job, "node1") for fault in OF_EVENTS]
            with pytest.raises(OSError, match="No space"):
                append(job.events_disk("node1").folder / "other", bytes(1 << 16))
            for restore in spoilt:
                restore()


def test_all_is_released_where_a_full_disk_keeps_no_events(disk: SmallDisk) -> None:
    """Disks of events and servers beside the job are gone; the error is a note on what ended the job before it."""
    cloud = Announce(node="node0", cloud=Provider.GCP, when=When(step=1))
    with EtcdServer() as etcd:
        job = player(etcd, disk.folder / "job", *OF_EVENTS, cloud)

        def interrupt() -> NoReturn:
            append(job.follower.folder / "node0-0.jsonl", bytes(1 << 16))
            disk.fill()
            raise SystemExit(130)

        with pytest.raises(SystemExit) as asked, job.undone():
            interrupt()
    assert "No space left" in asked.value.__notes__[0]
    assert not mounted(disk.folder / "job")
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(job._clouds["node0"][1].url, timeout=5)


@pytest.mark.usefixtures("disk")
def test_disks_of_events_are_gone_where_the_job_cannot_be_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no folder for its temporary files."""
    with EtcdServer() as etcd:
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "none"))
        with pytest.raises(OSError, match="none"):
            play(Setting(nodes=1), OF_EVENTS, etcd=etcd, workdir=tmp_path / "job")
    assert not mounted(tmp_path / "job")


def test_ctrl_c_of_a_terminal_does_not_reach_etcd() -> None:
    """It is needed until what was done to the job is undone."""
    with EtcdServer() as etcd:
        assert os.getpgid(etcd.members[0].pid) != os.getpgid(0)

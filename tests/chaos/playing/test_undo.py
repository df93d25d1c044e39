"""At the end what was done to a job is undone, as far as that can be, in seconds; what stands beside it is closed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NoReturn

import pytest

from chaos.faults.etcd import EtcdFull, EtcdRestored
from chaos.faults.moment import When
from chaos.playing.play import Player, Setting
from chaos.servers.etcd import EtcdServer
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


def player(etcd: EtcdServer, folder: Path) -> Watched:
    """Return a player of a job that is not started."""
    return Watched(Setting(nodes=1), (), etcd, folder, "undo", None, SYSTEM)


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


def test_ctrl_c_of_a_terminal_does_not_reach_etcd() -> None:
    """It is needed until what was done to the job is undone."""
    with EtcdServer() as etcd:
        assert os.getpgid(etcd.members[0].pid) != os.getpgid(0)

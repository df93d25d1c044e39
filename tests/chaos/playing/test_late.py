"""A fault happens only while the job that it befalls goes on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest

from chaos.faults.fault import About, Fault, LiveJob, Place
from chaos.faults.moment import When
from chaos.history.follow import Picture, Step
from chaos.playing.play import Player
from chaos.playing.setting import Setting
from chaos.servers.etcd import EtcdServer
from elastic3d.clock import SYSTEM

pytestmark = [pytest.mark.etcd, pytest.mark.timeout(60)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Befalls(Fault):
    """A fault that can be made while there is something that it can happen to."""

    WORD: ClassVar[str] = "befalls"
    ABOUT: ClassVar[About] = About(place=Place.PROCESS, enters="nowhere", promised="nothing")
    there: bool = True

    def make(self, job: LiveJob) -> bool:
        """Make it, if there is anything."""
        return self.there


def seen(steps: int, *, committed: int = 0) -> Picture:
    """Return the picture of a job after so many steps and commits."""
    made = [
        Step(number=number, generation=1, at=0.0, loss="", seconds=0.1, samples=(0, 1), sample_sum=0)
        for number in range(1, steps + 1)
    ]
    return Picture(steps=tuple(made), seen={("checkpoint.committed", 1): committed} if committed else {})


AT_3 = Befalls(when=When(step=3))
AT_END = Befalls(when=When(step=8))
NOTHING_THERE = Befalls(when=When(step=3, event="checkpoint.committed"), there=False)


@pytest.mark.parametrize(
    ("fault", "pictures", "made", "late", "undone"),
    [
        pytest.param(AT_3, [seen(2), seen(8)], False, True, False, id="its moment and the end are seen at once"),
        pytest.param(AT_3, [seen(2), seen(4), seen(8)], True, False, False, id="its moment is seen in time"),
        pytest.param(AT_END, [seen(2), seen(8)], True, False, False, id="its moment is the end"),
        pytest.param(NOTHING_THERE, [seen(2), seen(8, committed=1)], False, True, False, id="nothing is there then"),
        pytest.param(NOTHING_THERE, [seen(4, committed=1), seen(8)], False, False, True, id="nothing was there before"),
        pytest.param(NOTHING_THERE, [seen(4), seen(8)], False, False, True, id="its moment never came"),
    ],
)
def test_a_fault_whose_moment_is_seen_when_the_job_is_over_is_late(
    fault: Befalls, pictures: list[Picture], made: bool, late: bool, undone: bool, tmp_path: Path
) -> None:
    """A busy machine reads events in lumps. It is not made then, as if that proved anything, and nothing is broken."""
    with EtcdServer() as etcd:
        job = Player(replace(Setting(nodes=1), steps=8), [fault], etcd, tmp_path, "late", None, SYSTEM)
        with job.undone():
            for job.picture in pictures:
                job.inject()
            outcome = job.outcome([fault], "")
    assert [one for one, _ in outcome.made] == [fault] * made
    assert outcome.late == (fault,) * late
    assert outcome.undone == (fault,) * undone

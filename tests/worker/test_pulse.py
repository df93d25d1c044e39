"""What a node reports to people about its work."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from elastic3d.coverage import AuditCoverage
from elastic3d.health.sheet import StepSheet
from elastic3d.membership.records import HealthFigures, Pulse, decode, encode
from elastic3d.port import StepRecord
from elastic3d.worker.pulse import KEPT, Figures


def record(step: int, safe: int) -> StepRecord:
    return StepRecord(
        generation=1,
        step=step,
        loss=1.0,
        gradient_norm=None,
        seconds=0.5,
        safe_step=safe,
        etcd_away_everywhere=False,
        samples=(0, 1),
        sample_sum=0,
    )


def test_a_node_that_never_trained_reports_nothing() -> None:
    """No step, no snapshot, no checkpoint, and no trouble."""
    pulse = Figures().pulse("spare", 0, 9.0)
    assert (pulse.step, pulse.snapshot_step, pulse.snapshot_age, pulse.checkpoint_step) == (-1, -1, -1.0, -1)
    assert pulse.health == "ok"


def test_the_last_failure_is_known_at_the_end() -> None:
    """With the newest checkpoint there is, unless it was overcome."""
    figures = Figures()
    assert figures.behind() == (None, "")
    figures.committed(10, 1.0)
    figures.failed(20, "no space left")
    assert figures.behind() == (10, "checkpoint of step 20 failed: no space left")
    figures.committed(30, 2.0)
    assert figures.behind() == (30, "")


def test_a_snapshot_is_as_old_as_its_step() -> None:
    """The vote of step 3 makes step 2 safe: the age is that of step 2, not of the vote."""
    figures = Figures()
    for step, safe, at in ((1, -1, 10.0), (2, 1, 11.0), (3, 2, 12.0)):
        figures.stepped(record(step, safe), at)
    pulse = figures.pulse("active", 1, 12.5)
    assert (pulse.step, pulse.step_seconds) == (3, 0.5)
    assert (pulse.snapshot_step, pulse.snapshot_age) == (2, 1.5)


def test_without_snapshots_old_steps_are_forgotten() -> None:
    """A run of a million steps of which none is ever safe takes no more memory, nor time for each, than a short one."""
    figures = Figures()
    for step in range(1, 3 * KEPT):
        figures.stepped(record(step, -1), float(step))
    assert len(figures._made) <= KEPT + 1
    figures.stepped(record(3 * KEPT, 3 * KEPT - 5), 3.0 * KEPT)
    assert figures.pulse("active", 1, 3.0 * KEPT).snapshot_age == 5.0


def test_repeated_steps_are_reported_as_they_come() -> None:
    """After a death the step goes back to the safe one; a node that joined counts from its first report."""
    figures = Figures()
    figures.stepped(record(8, 7), 20.0)
    assert figures.pulse("active", 2, 21.0).snapshot_age == 1.0
    figures.stepped(record(6, 5), 30.0)
    pulse = figures.pulse("active", 3, 31.0)
    assert (pulse.step, pulse.snapshot_step, pulse.snapshot_age) == (6, 5, 1.0)


def test_a_failed_checkpoint_is_trouble_until_one_is_written() -> None:
    """Training goes on without it, and people are told."""
    figures = Figures()
    figures.failed(10, "no space")
    assert figures.pulse("active", 1, 1.0).health == "checkpoint of step 10 failed: no space"
    figures.committed(20, 5.0)
    pulse = figures.pulse("active", 1, 8.0)
    assert (pulse.health, pulse.checkpoint_step, pulse.checkpoint_age) == ("ok", 20, 3.0)


def test_a_later_write_ends_the_trouble() -> None:
    """A leader deposed while it committed never learns of its commit."""
    figures = Figures()
    figures.failed(10, "generation 2 owns refs/latest")
    figures.wrote(10)
    assert figures.pulse("active", 2, 1.0).health != "ok"
    figures.wrote(20)
    assert figures.pulse("active", 2, 1.0).health == "ok"


def test_what_audits_see_is_that_of_the_generation_that_trains() -> None:
    """Until its trainers have begun nobody knows; each step says up to where the audits vouch."""
    figures = Figures(HealthFigures(idle=3.0, busy=30.0, audit=0.01))
    figures.audits(AuditCoverage(every=4, pieces=0.5, nodes=2))
    figures.stepped(replace(record(9, 8), clean=7), 20.0)
    watch = figures.pulse("active", 1, 21.0).watch
    assert watch is not None
    assert (watch.clean, watch.coverage) == (7, AuditCoverage(every=4, pieces=0.5, nodes=2))
    figures.audits(None)
    watch = figures.pulse("active", 2, 22.0).watch
    assert watch is not None
    assert (watch.clean, watch.coverage, watch.idle) == (-1, None, 3.0)
    assert Figures().pulse("spare", 0, 9.0).watch is None


def test_what_is_not_checked_is_known_until_the_next_generation() -> None:
    """Once, whoever says it; that state has been restored meanwhile does not change it."""
    figures = Figures(HealthFigures(idle=3.0, busy=30.0, at_rest=0.005))
    figures.begin()
    for _ in range(2):
        figures.unchecked("updates", "Muon does not treat each number by itself")
    figures.audits(None)
    watch = figures.pulse("active", 1, 1.0).watch
    assert watch is not None
    assert watch.unchecked == ("updates: Muon does not treat each number by itself",)
    figures.begin()
    watch = figures.pulse("active", 2, 2.0).watch
    assert watch is not None
    assert watch.unchecked == ()


def test_the_loss_of_the_newest_step_is_reported() -> None:
    """It is not known before the first step, and a pulse of another version that lacks it is read all the same."""
    figures = Figures()
    assert figures.pulse("active", 1, 1.0).loss is None
    figures.stepped(replace(record(3, 2), loss=2.25), 2.0)
    pulse = figures.pulse("active", 1, 3.0)
    assert decode(Pulse, encode(pulse), "pulses/a") == pulse
    assert pulse.loss == 2.25
    older = json.loads(encode(pulse))
    del older["loss"]
    assert decode(Pulse, json.dumps(older).encode(), "pulses/a") == replace(pulse, loss=None)


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_leaves_the_pulse_readable(loss: float) -> None:
    """Records with such numbers are refused by their readers: the pulse says in words what is wrong, not here."""
    figures = Figures()
    figures.stepped(replace(record(3, 2), loss=loss), 2.0)
    pulse = figures.pulse("active", 1, 3.0)
    assert (pulse.step, pulse.loss) == (3, None)


def test_a_pulse_has_what_a_step_goes_into_and_the_target() -> None:
    """The share that was computing, of this generation only; it is not known where no row came."""
    figures = Figures()
    figures.stepped(replace(record(8, 7), until=500), 1.0)
    assert (figures.pulse("active", 1, 2.0).until, figures.pulse("active", 1, 2.0).busy) == (500, -1.0)
    figures.sheet(StepSheet(work=1.0, rounds=2.0, forward=0.25, backward=0.5, data=0.15, wait_dp=0.1).row)
    figures.sheet(())
    assert figures.pulse("active", 1, 2.0).busy == 0.75
    figures.begin()
    assert figures.pulse("active", 2, 3.0).busy == -1.0

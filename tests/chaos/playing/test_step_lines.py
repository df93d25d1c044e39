"""What somebody sees of a script from outside: the steps that it tells, in the usual words or in its own."""

from __future__ import annotations

import re
from math import inf, isnan
from pathlib import Path

import pytest
from typer.testing import CliRunner

from chaos.commands.app import app
from chaos.faults.moment import When
from chaos.faults.orders import Join
from chaos.playing.own_script import quiet_key
from chaos.playing.step_lines import step_of, step_pattern
from chaos.schedules.as_test import as_test
from chaos.schedules.schedule import Schedule
from chaos.storms.storm import Job, kept_storm, write_job
from elastic3d.errors import UsageError


@pytest.mark.parametrize(
    ("line", "step", "loss"),
    [
        ("step 12 loss 0.250000", 12, 0.25),
        ("[default0]: Step: 7, loss=1.5e-3", 7, 0.0015),
        ("{'loss': 2.5, 'step': 40}", 40, 2.5),
        ("epoch 1 | step #3 | train loss -0.5 | lr 1e-4", 3, -0.5),
        ("step=8", 8, None),
        ("step 9 loss nan", 9, inf),
        ("step=9 loss=-inf", 9, -inf),
        ("step 9, loss infinitesimal", 9, None),
    ],
)
def test_a_line_tells_a_step_in_whatever_words(line: str, step: int, loss: float | None) -> None:
    """And its loss, if it has one: of one that is no number the script says that it has gone astray."""
    told_of = step_of(line)
    assert told_of is not None
    assert told_of[0] == step
    assert isnan(told_of[1]) if loss is None else told_of[1] == loss


@pytest.mark.parametrize("line", ["", "steps: 12", "stepped 3 times", "step by step", "footstep 4", "loss 0.5"])
def test_other_lines_tell_none(line: str) -> None:
    """A word that only begins or ends like it is another one."""
    assert step_of(line) is None


@pytest.mark.parametrize(
    ("pattern", "line", "step"),
    [
        (r"iter: *(\d+)", "iter:   12 loss 0.25", 12),
        (r"(?i)\[(?:it|iter) (?P<step>[0-9]{1,9})\]", "[ITER 7] loss: 0.25", 7),
        (r"[(]batch (\d+)[)]", "(batch 3) loss=0.25", 3),
        (r"iter: *(\d*)", "iter: none", None),
        (r"iter: *(\d+)", "step 12 loss 0.25", None),
    ],
)
def test_a_script_may_have_words_of_its_own(pattern: str, line: str, step: int | None) -> None:
    """Then the usual ones tell nothing; the loss is told as ever."""
    assert step_of(line, step_pattern(pattern)) == (None if step is None else (step, 0.25))


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("iter: *(", "it is no regular expression: missing )"),
        (r"iter: *\d+", "it has 0 groups; put one around the step's digits"),
        (r"(iter): *(\d+)", "it has 2 groups"),
        ("iter: *(.*)", "its group has to match digits and nothing else, as in 'iter: *(\\d+)'"),
        (r"iter: *(\d+|none)", "its group has to match digits"),
        (r"iter: *(-?\d+)", "its group has to match digits"),
    ],
)
def test_what_can_tell_no_step_is_refused(pattern: str, why: str, tmp_path: Path) -> None:
    """Before anything is played, with exit code 2 and what to do."""
    with pytest.raises(UsageError, match=re.escape(why)):
        step_pattern(pattern)
    (tmp_path / "ddp.py").write_text("")
    given = ["random", "--script", str(tmp_path / "ddp.py"), "--mode", "restart", "--step-pattern", pattern]
    result = CliRunner().invoke(app, given)
    assert (result.exit_code, why in result.stderr) == (2, True)


def test_a_step_pattern_is_kept_with_the_run(tmp_path: Path) -> None:
    """For what plays it again, and for the undisturbed run, which is another one with other steps."""
    (tmp_path / "ddp.py").write_text("")
    job = Job(script=str(tmp_path / "ddp.py"), conf={"mode": "restart"}, step_pattern=r"iter: *(\d+)")
    (tmp_path / "out").mkdir()
    schedule = Schedule(faults=(Join(when=When(step=3)),))
    write_job(tmp_path / "out", schedule, job)
    assert kept_storm(tmp_path / "out")[1] == job
    assert job.setting().step_pattern == job.step_pattern
    plain = Job(script=job.script, conf=job.conf)
    assert quiet_key(job.setting()) != quiet_key(plain.setting())
    names: dict[str, object] = {}
    exec(as_test(schedule, job, name="7", promise="it ends"), names)
    assert names["JOB"] == job
    with pytest.raises(UsageError, match="it is of --mode restart"):
        Job(script=job.script, step_pattern=job.step_pattern)

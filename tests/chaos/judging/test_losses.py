"""Losses instead of bits: what is near is kept, what is not is named, and nothing else of a job is asked less."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from chaos.commands.app import app
from chaos.judging.losses import apart
from chaos.judging.oracle import judge
from chaos.judging.restart import judge_restart
from chaos.playing.outcome import Outcome
from chaos.playing.step_lines import step_of
from chaos.storms.storm import Job, keep, kept_storm
from elastic3d.errors import UsageError
from tests.chaos.judging.test_oracle import outcome, quiet
from tests.chaos.judging.test_restart import outcome as restarted
from tests.chaos.made_up_events import a_death_and_a_join, step
from tests.chaos.storms.test_storm import setting, storm

NEAR = "whatever happens, each loss is that of a run that nothing happens to, within 0.001 of it"
AGAIN = "a step that is made again has the same loss, within 0.001 of it"


def with_losses(**losses: float) -> Outcome:
    """Return a history whose digest is another one, with other losses of some steps: s6 of step 6, s3 of it again."""
    events = a_death_and_a_join()
    for at, one in enumerate(events):
        name = f"s{one.fields.get('step')}"
        if one.name == "step.committed" and name in losses and (name != "s3" or one.generation == 2):
            events[at] = step(int(one.fields["step"]), one.at, one.generation, loss=losses[name])
    return outcome(events, digest="abd")


@pytest.mark.parametrize(
    ("loss", "other", "share"),
    [
        (2.0, 2.0, 0.0),
        (2.002, 2.0, 0.001),
        (-0.0, 0.0, 0.0),
        (1e-9, 0.0, math.inf),
        (math.nan, 2.0, math.inf),
        (2.0, math.nan, math.inf),
        (math.nan, math.nan, 0.0),
        (math.inf, math.inf, 0.0),
    ],
)
def test_a_difference_is_a_share_of_the_undisturbed_loss(loss: float, other: float, share: float) -> None:
    """What is not finite is like nothing else."""
    assert apart(loss.hex(), other.hex()) == pytest.approx(share)


def test_losses_that_are_near_are_kept_though_bits_are_not() -> None:
    """Of a step that is made again too, and however the samples of a step were given to ranks."""
    # Steps 3 and 6 have losses of 4.7 and 4.4.
    near = with_losses(s3=4.7 * 1.0005, s6=4.4 * 0.9999)
    assert not judge(near, quiet()).kept
    verdict = judge(near, quiet(), tolerance=1e-3)
    assert (verdict.kept, verdict.same_bits, verdict.same_losses, verdict.tolerance) == (True, None, True, 1e-3)
    (promise,) = [one for one in verdict.promises if one.says == NEAR]
    assert promise.seen == "6 losses, the largest difference is 0.0005, of step 3"
    assert judge(near, tolerance=1e-3).same_losses is None, "there is nothing to compare with"


def test_a_loss_that_is_not_near_is_a_broken_promise() -> None:
    """With the first step, the largest difference, and what was tolerated; so is a step that is missing."""
    verdict = judge(with_losses(s5=4.5 * 1.01, s6=4.4 * 1.1), quiet(), tolerance=1e-3)
    assert verdict.same_losses is False
    text = "loss of step 5 is 4.545, undisturbed 4.5: 0.01 of it, and 0.001 is tolerated"
    assert verdict.broken == (f"{text}; 2 steps in all, the largest difference is 0.1",)
    again = judge(with_losses(s3=4.8), quiet(), tolerance=1e-3)
    assert [one.says for one in again.promises if one.broken] == [AGAIN, NEAR]
    events = [one for one in a_death_and_a_join() if one.fields.get("step") != 6]
    assert "5 steps, undisturbed 6" in judge(outcome(events), quiet(), tolerance=1e-3).broken
    nan = judge(with_losses(s6=math.nan), quiet(), tolerance=1e-3)
    assert nan.same_losses is False


def test_losses_that_a_plain_script_prints_are_judged_too() -> None:
    """Of the steps of which both runs tell one, whatever its result is."""
    events = [step(number, 20.0 + number, 1, loss=1.0 / number) for number in (1, 2, 3)]
    calm = restarted(*events)
    other = [events[0], step(2, 22.0, 1, loss=0.5004), step(3, 23.0, 1, loss=math.nan)]
    verdict = judge_restart(replace(restarted(*other), digest="abd"), calm, tolerance=1e-3)
    assert (verdict.same_bits, verdict.same_losses, verdict.broken) == (None, True, ())
    assert "2 losses" in verdict.promises[-1].seen
    assert not judge_restart(restarted(*other), calm, tolerance=1e-4).kept
    silent = [step(number, 20.0 + number, 1, loss=math.nan) for number in (1, 2)]
    assert judge_restart(restarted(*silent), calm, tolerance=1e-3).promises[-1].held is None


def test_a_loss_that_a_plain_script_prints_as_no_number_is_near_to_none() -> None:
    """It is not taken for one that was not told, of which nothing is judged."""
    calm = restarted(step(1, 21.0, 1, loss=1.0), step(2, 22.0, 1, loss=0.5))
    told = step_of("step 2 loss nan")
    assert told is not None
    verdict = judge_restart(restarted(step(1, 21.0, 1, loss=1.0), step(2, 22.0, 1, loss=told[1])), calm, tolerance=1e-3)
    assert verdict.broken == ("loss of step 2 is inf, undisturbed 0.5: inf of it, and 0.001 is tolerated",)


@pytest.mark.parametrize("tolerance", [0.0, -1e-3, 1.0, math.nan, math.inf])
def test_what_is_no_share_is_refused(tolerance: float, tmp_path: Path) -> None:
    """Before anything is played, with exit code 2."""
    with pytest.raises(UsageError, match=r"give a share of each loss, above 0 and below 1, such as 1e-3"):
        Job(script="train.py", tolerance=tolerance)
    (tmp_path / "train.py").write_text("")
    given = ["random", "--script", str(tmp_path / "train.py"), f"--tolerance={tolerance}"]
    assert CliRunner().invoke(app, given).exit_code == 2


def test_a_tolerance_needs_an_undisturbed_run(tmp_path: Path) -> None:
    """So that it is refused where nothing is compared."""
    (tmp_path / "storm.toml").write_text("[[fault]]\ndo = 'join'\nat = {step = 3}\n")
    (tmp_path / "train.py").write_text("")
    given = ["run", str(tmp_path / "storm.toml"), "--script", str(tmp_path / "train.py"), "--tolerance", "1e-3"]
    result = CliRunner().invoke(app, [*given, "--no-compare"])
    assert (result.exit_code, "leave out --no-compare" in result.stderr) == (2, True)


def test_a_tolerance_is_kept_with_the_run(tmp_path: Path) -> None:
    """What plays it again judges by the same; page, document and terminal say what was judged."""
    script = tmp_path / "train.py"
    script.write_text("import elastic3d\n")
    made = storm(setting(script), digest="other bits")
    calm = replace(made.outcome, digest="abc")
    near = replace(made, verdict=judge(made.outcome, calm, tolerance=1e-3))
    assert near.kept
    job = Job(script=str(script), seed=7, tolerance=1e-3)
    folder = keep(near, job, tmp_path / "out", tmp_path)
    assert kept_storm(folder)[1] == job
    page = (folder / "report.html").read_text()
    assert "with the losses of a run that nothing happened to, within 0.001 of each" in page
    assert "losses, within 0.001 of each" in page
    document = near.document()
    assert (document["tolerance"], document["same_losses"], document["same_bits"]) == (1e-3, True, None)
    assert made.document()["tolerance"] is None

"""What somebody sees of a script from outside: the steps that it tells."""

from __future__ import annotations

from math import isnan

import pytest

from chaos.playing.observer import step_of


@pytest.mark.parametrize(
    ("line", "step", "loss"),
    [
        ("step 12 loss 0.250000", 12, 0.25),
        ("[default0]: Step: 7, loss=1.5e-3", 7, 0.0015),
        ("{'loss': 2.5, 'step': 40}", 40, 2.5),
        ("epoch 1 | step #3 | train loss -0.5 | lr 1e-4", 3, -0.5),
        ("step=8", 8, None),
        ("step 9 loss nan", 9, None),
    ],
)
def test_a_line_tells_a_step_in_whatever_words(line: str, step: int, loss: float | None) -> None:
    """And its loss, if it has one that is a number."""
    told_of = step_of(line)
    assert told_of is not None
    assert told_of[0] == step
    assert isnan(told_of[1]) if loss is None else told_of[1] == loss


@pytest.mark.parametrize("line", ["", "steps: 12", "stepped 3 times", "step by step", "footstep 4", "loss 0.5"])
def test_other_lines_tell_none(line: str) -> None:
    """A word that only begins or ends like it is another one."""
    assert step_of(line) is None

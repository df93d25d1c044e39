"""No promise is judged that nobody has broken on purpose to see the judge find it."""

from __future__ import annotations

from chaos.judging.bars import Bars, promises
from chaos.judging.notices import notices
from chaos.judging.oracle import judge
from tests.chaos.judging.test_bars import outcome
from tests.histories.test_planted_promises import PLANTS


def test_each_promise_has_a_plant_that_breaks_it() -> None:
    """Those of every run, and those of times, for the bars that the plants are judged by."""
    made = outcome(noticed=1.0, next_step=1.0)
    timed = promises(made, tuple(notices(made, made.events)), Bars(noticed=1.0, recovered=15.0))
    assert {promise.says for promise in (*judge(made).promises, *timed)} == {plant.promise for plant in PLANTS}

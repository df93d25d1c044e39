"""What a node reports of the training while it runs."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from elastic3d.data.holes import Holes
from elastic3d.port import StepRecord
from elastic3d.worker.keeper.progress import ProgressReporter
from elastic3d.worker.pulse import Figures
from tests.clocks import HandClock

RECORD = StepRecord(
    generation=2,
    step=0,
    loss=1.25,
    gradient_norm=None,
    seconds=0.5,
    safe_step=-1,
    etcd_away_everywhere=False,
    samples=(0, 1),
    sample_sum=0,
    until=1000,
)


class Heard:
    """A progress report with a clock of its own, and its output."""

    def __init__(self) -> None:
        self.said: list[tuple[str, dict[str, Any]]] = []
        self.clock, self.figures = HandClock(), Figures()
        self.progress = ProgressReporter(self._emit, self.figures, clock=self.clock)

    def _emit(self, name: str, **fields: Any) -> None:
        self.said.append((name, fields))

    def steps(self, first: int, last: int, *, every: float = 0.5, loss: float = 1.25, excluded: Holes = ()) -> None:
        for step in range(first, last + 1):
            self.clock.now += every
            self.progress.stepped(replace(RECORD, step=step, loss=loss, excluded=excluded))
            self.progress.look()

    def taken(self, name: str) -> list[dict[str, Any]]:
        events = [fields for said, fields in self.said if said == name]
        self.said = []
        return events

    def health(self) -> str:
        return self.figures.pulse("active", 2, self.clock.now).health


def test_progress_is_logged_every_ten_seconds() -> None:
    """The first step at once; then the time left at the rate since the previous line."""
    heard = Heard()
    heard.progress.began(first=True)
    heard.steps(1, 61)
    lines = heard.taken("training.progress")
    assert [line["step"] for line in lines] == [1, 21, 41, 61]
    assert lines[0] == {
        "step": 1,
        "until": 1000,
        "loss": "1.25",
        "generation": 2,
        "steps_per_second": None,
        "left": None,
    }
    assert (lines[1]["steps_per_second"], lines[1]["left"]) == (2.0, "8min 10s")


def test_a_line_has_the_latest_of_what_the_script_logs() -> None:
    """Some of it, also where the step of the line has none: a validation is logged seldom."""
    heard = Heard()
    heard.progress.began(first=True)
    logged = [{"lr": 0.00123456, "eval/accuracy": 0.5}, {"lr": 0.001}, {}]
    for step, values in enumerate(logged, 1):
        heard.clock.now += 10.0
        heard.progress.stepped(replace(RECORD, step=step, logged=values))
    lines = [line.get("logged") for line in heard.taken("training.progress")]
    assert lines == ["lr 0.001235, eval/accuracy 0.5", *["lr 0.001, eval/accuracy 0.5"] * 2]
    heard.clock.now += 10.0
    heard.progress.stepped(replace(RECORD, step=4, logged={f"x{n}": float(n) for n in range(5)}))
    (line,) = heard.taken("training.progress")
    assert line["logged"] == "lr 0.001, eval/accuracy 0.5, x0 0, x1 1, 3 more"


def test_a_non_finite_loss_is_reported_once_in_a_row() -> None:
    """`status` shows it until there is a finite one again."""
    heard = Heard()
    heard.progress.began(first=True)
    heard.steps(1, 2)
    heard.steps(3, 5, loss=math.nan)
    assert "loss of step 5 is nan" in heard.health()
    heard.steps(6, 6)
    assert heard.health() == "ok"
    heard.steps(7, 7, loss=math.inf)
    assert [said["step"] for said in heard.taken("loss.nonfinite")] == [3, 7]


def test_a_step_of_which_nothing_is_left_has_no_loss_and_that_is_well() -> None:
    """Its samples were left out; one of which only a part was is judged as any other."""
    heard = Heard()
    heard.progress.began(first=True)
    first, stop = RECORD.samples
    heard.steps(1, 3, loss=math.nan, excluded=((first, stop),))
    assert heard.health() == "ok"
    heard.steps(4, 4, loss=math.nan, excluded=((first, stop - 1),))
    assert [said["step"] for said in heard.taken("loss.nonfinite")] == [4]


def test_a_minute_without_a_step_is_reported_each_minute() -> None:
    """Only on the node with rank 0; not if steps take that long, nor when nothing runs."""
    heard = Heard()
    heard.progress.began(first=True)
    heard.steps(1, 3)
    for _ in range(125):
        heard.clock.now += 1
        heard.progress.look()
    assert [said["detail"] for said in heard.taken("step.late")] == ["no step for 60 s", "no step for 120 s"]
    assert heard.health() == "no step for 125 s"
    heard.steps(4, 4)
    assert heard.health() == "ok"
    heard.clock.now += 200
    heard.progress.look()
    assert not heard.taken("step.late")
    heard.progress.over()
    heard.clock.now += 1000
    heard.progress.look()
    heard.progress.began(first=False)
    heard.clock.now += 1000
    heard.progress.look()
    assert not heard.said


def test_missing_nodes_are_reported_every_ten_seconds() -> None:
    """After a moment in which they may still come, and no more once they are there."""
    heard = Heard()
    heard.progress.awaiting(2)
    heard.progress.look()
    assert not heard.said
    for _ in range(25):
        heard.clock.now += 1
        heard.progress.look()
    assert [said["detail"] for said in heard.taken("nodes.awaited")] == ["waiting for 2 more node(s)"] * 3
    heard.progress.awaiting(1, "no layout is for 3 nodes")
    heard.clock.now += 10
    heard.progress.look()
    assert [one["detail"] for one in heard.taken("nodes.awaited")] == [
        "waiting for 1 more node(s): no layout is for 3 nodes"
    ]
    heard.progress.awaiting(0)
    heard.clock.now += 60
    heard.progress.look()
    assert not heard.said

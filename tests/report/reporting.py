"""Reports of runs that are made up, for tests."""

from __future__ import annotations

from typing import Any

from elastic3d.accounting.clock_offsets import by_one_clock, clock_offsets
from elastic3d.accounting.goodput import missing
from elastic3d.accounting.node_lives import in_starts, lives
from elastic3d.accounting.past_run import past_run
from elastic3d.accounting.recorded_events import recorded
from elastic3d.report.document import RunReport
from elastic3d.report.making import WhatWasLeft, report
from tests.accounting.written import Written, started

WRITTEN = 1_700_009_000.0


def reported(lines: dict[str, list[str]], **more: Any) -> RunReport:
    """Return the report of what each node wrote."""
    all_lives = in_starts(
        [
            life
            for node, mine in lines.items()
            for life in lives(node, list(filter(None, (recorded(line, node) for line in mine))))
        ]
    )
    clocks = clock_offsets(all_lives)
    run = past_run(by_one_clock(all_lives, clocks))
    return report(WhatWasLeft(name="made-up", run=run, clocks=clocks, remarks=missing(run, clocks), **more))


def a_failure() -> Written:
    """Return a run of two nodes of which one dies at 13.5 after 10 steps, three of which are made again.

    Steps 1 to 10 are made from 3 to 13; node b is lost at 14, and generation 2 of a alone is sealed at 15, has its
    state at 17, and makes steps 8 to 12 until 22.
    """
    written = started(["a", "b"])
    written.steps(1, 10, 3.0, 1, "a")
    for node, new in (("a", 40), ("b", 60)):
        written.say(node, 8.2, "checkpoint.written", step=5, bytes=100, new=new, seconds=0.25)
    written.say("a", 8.5, "checkpoint.committed", step=5, moved=True)
    written.say("b", 9.0, "checkpoint.verified", step=5, kind="sample", seconds=0.1)
    written.say("b", 13.5, "training.progress", generation=1, step=10)
    written.say("a", 14.0, "peer.lost", peer="b", evidence="its connection closed")
    written.seal(2, 15.0, "death", ["a"], detail="b is lost", layout={"pp": 1, "dp": 1, "tp": 1, "zero": 3})
    written.begin(2, 15.0, ["a"], step=7)
    written.steps(8, 12, 17.0, 2, "a")
    for at in (18.0, 19.0):
        written.say("a", at, "checkpoint.failed", step=10, error="no space left", age=9.0)
    written.say("a", 20.0, "checkpoint.written", step=10, bytes=200, new=200)
    written.end(2, 22.5, ["a"])
    return written

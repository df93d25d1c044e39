"""Islands of real ranks: what they come to follows from the records, whatever happened within and between them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from elastic3d.islands import Islands
from elastic3d.islands.record import account
from elastic3d.training import run_alone
from elastic3d.values import Layout
from tests.islands import mains
from tests.islands.plain import replayed
from tests.islands.together import Together, results

pytestmark = pytest.mark.gloo


@pytest.mark.parametrize(
    ("options", "rates"),
    [
        ({"outer": "average"}, {"lr": 1.0, "mu": 0.0}),
        ({"outer": "nesterov"}, {}),
        ({"fragments": 3}, {"fragments": 3}),
        ({"overlap": 2}, {"overlap": 2, "mixing": 0.5}),
        ({"overlap": 1, "mixing": 0.0}, {"overlap": 1}),
        ({"every": 6, "fragments": 2, "overlap": 1}, {"every": 6, "fragments": 2, "overlap": 1, "mixing": 0.5}),
    ],
    ids=["local SGD", "DiLoCo", "streaming", "overlap", "overlap, nothing kept", "streaming with overlap"],
)
def test_islands_of_other_layouts_come_to_the_bits_of_a_plain_loop(
    tmp_path: Path, options: Mapping[str, Any], rates: Mapping[str, Any]
) -> None:
    """One process of plain torch, which has the records and nothing else, has the same bits as all of them."""
    both = Together(tmp_path, **options)
    both.start("east", Layout(pp=2, dp=1))
    both.start("west", Layout(pp=1, dp=2, zero=3))
    east, west = results(both.end("east")), results(both.end("west"))
    given = {"every": mains.EVERY, "fragments": 1, "mixing": 0} | rates
    same = given["fragments"] == 1 and not given["mixing"]
    assert (east[0] == west[0]) == same, "after an outer step of all parameters they are the same"
    assert east[1] != west[1], "and each has its own inner optimizer, of its own samples"
    assert replayed(both.records, **rates) == {"east.1": east, "west.1": west}
    outer_steps = mains.EVERY * mains.ROUNDS * given["fragments"] // given["every"]
    assert len(both.records) == outer_steps + 1
    chunks = account(both.records)
    assert chunks.whole
    replay = Islands(store=both.store, keep=None, replay="west.1", **({"every": mains.EVERY} | options))
    again: list[Any] = []
    run_alone(lambda run: again.append(mains.train(run, steps=99 * given["every"])), islands=replay, threads=1)
    assert again == [(*west, True)], "one process trains what two ranks did once more"
    assert chunks.consumed == 2 * outer_steps


def test_a_node_lost_within_an_island_changes_nothing(tmp_path: Path) -> None:
    """It goes on from its snapshot, also right before an outer step, in another layout; the others wait."""
    both = Together(tmp_path)
    kept = tmp_path / "kept"
    kept.mkdir()
    both.start("west")
    leaving = dict.fromkeys(range(2), mains.EVERY - 1)
    both.start("east", Layout(pp=1, dp=2, zero=2), keep=kept, leave_at=leaving, snapshot_every=1)
    assert [report.error for report in both.end("east", "left")] == [str(mains.EVERY)] * 2
    both.start("east", Layout(pp=2, dp=1), take=kept)
    east, west = results(both.end("east")), results(both.end("west"))
    assert replayed(both.records) == {"east.1": east, "west.1": west}
    assert not any(record.lost for record in both.records)


def test_an_island_that_dies_is_left_out_of_the_next_outer_step(tmp_path: Path) -> None:
    """The other goes on alone, takes over its samples, and has the bits that the records say."""
    both, go = Together(tmp_path, minimum=1, patience=2), tmp_path / "go"
    both.start("west", main=partial(mains.train, die_at=mains.EVERY + 1), options={"minimum": 2})
    both.await_that(lambda exchange: exchange.joined())
    # It waits for the other's first delta as long as that takes, and then two seconds for one that never comes.
    both.start("east", main=partial(mains.train, wait_at=(mains.EVERY - 1, str(go))))
    both.await_that(lambda exchange: exchange.sent_by(1, "west.1"))
    go.touch()
    assert both.end("west", "died")
    east = results(both.end("east"))
    records = both.records
    assert replayed(records)["east.1"] == east
    lost = [record for record in records if record.lost]
    assert [record.lost for record in lost] == [("west.1",)]
    chunk = records[lost[0].outer - 1].members["west.1"]
    assert lost[0].members == {"east.1": chunk}, "its samples are handed out again"
    assert account(records).whole


def test_an_island_that_comes_too_late_begins_anew(tmp_path: Path) -> None:
    """An outer step was sealed without it: it is behind, joins again, and its samples are trained once more."""
    both, go, stop = Together(tmp_path, minimum=1, patience=8), tmp_path / "go", tmp_path / "stop"
    late = partial(mains.train, wait_at=(1, str(go)))
    both.start("west", Layout(pp=1, dp=2, zero=3), main=late, options={"minimum": 2})
    both.await_that(lambda exchange: exchange.joined())
    both.start("east", main=partial(mains.train, wait_at=(mains.EVERY + 1, str(stop))))
    both.await_that(lambda exchange: exchange.sealed(1))
    go.touch()
    both.await_that(lambda exchange: "west.2" in exchange.joined())
    stop.touch()
    east, west = results(both.end("east")), results(both.end("west"))
    records = both.records
    assert [record.lost for record in records if record.lost] == [("west.1",)]
    assert replayed(records) == {"east.1": east, "west.2": west}
    assert account(records).whole


def test_an_island_that_joins_begins_from_the_last_outer_parameters(tmp_path: Path) -> None:
    """It waits for the next outer step, and from then on all have the same weights."""
    both, go = Together(tmp_path, minimum=1), tmp_path / "go"
    both.start("east", main=partial(mains.train, wait_at=(mains.EVERY + 1, str(go))))
    both.await_that(lambda exchange: exchange.sealed(1))
    both.start("west", Layout(pp=2, dp=1))
    both.await_that(lambda exchange: len(exchange.joined()) == 2)
    go.touch()
    east, west = results(both.end("east")), results(both.end("west"))
    records = both.records
    assert [record.admitted for record in records if record.admitted] == [("east.1",), ("west.1",)]
    assert replayed(records) == {"east.1": east, "west.1": west}
    assert account(records).whole

"""Deltas are exchanged while inner steps go on: what comes of it does not depend on what happens meanwhile."""

from __future__ import annotations

import shutil
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from checkpointing import open_store
from elastic3d.errors import StateError
from elastic3d.islands import Islands
from elastic3d.islands.exchange import Exchange
from elastic3d.islands.record import account
from elastic3d.training import Run, run_alone
from elastic3d.values import Layout
from tests.islands import mains
from tests.islands.plain import replayed
from tests.islands.together import Together, results
from tests.parallel.models import Sentences, loss_fn

OVERLAP = 2
SENT_AT = mains.EVERY - OVERLAP
BITS = partial(replayed, overlap=OVERLAP, mixing=0.5)


@pytest.mark.gloo
def test_a_delta_goes_out_while_the_script_is_within_its_steps(tmp_path: Path) -> None:
    """And the record is there before the step that its outer step follows; without overlap neither would be."""
    both, go = Together(tmp_path, overlap=OVERLAP), tmp_path / "go"
    for name in ("east", "west"):
        both.start(name, Layout(pp=1, dp=2, zero=3), main=partial(mains.train, wait_at=(SENT_AT + 1, str(go))))
    both.await_that(lambda exchange: exchange.sealed(1))
    go.touch()
    east, west = results(both.end("east")), results(both.end("west"))
    assert BITS(both.records) == {"east.1": east, "west.1": west}


@pytest.mark.gloo
@pytest.mark.parametrize("left_at", range(SENT_AT, mains.EVERY + 1))
def test_a_run_goes_on_from_a_snapshot_within_an_exchange(tmp_path: Path, left_at: int) -> None:
    """In another layout, from any step of those; and what it had sent never arrived, so that it is sent again."""
    both, kept, go = Together(tmp_path, overlap=OVERLAP), tmp_path / "kept", tmp_path / "go"
    kept.mkdir()
    both.start("west", main=partial(mains.train, wait_at=(0, str(go))))
    leaving = dict.fromkeys(range(2), left_at - 1)
    both.start("east", Layout(pp=1, dp=2, zero=2), keep=kept, leave_at=leaving, snapshot_every=1)
    assert [report.error for report in both.end("east", "left")] == [str(left_at)] * 2
    exchange = Exchange(open_store(str(both.store)))
    exchange.store.delete("sent/00000001/east.1.json")
    shutil.rmtree(both.store / "deltas", ignore_errors=True)
    go.touch()
    both.start("east", Layout(pp=2, dp=1), take=kept)
    east, west = results(both.end("east")), results(both.end("west"))
    assert BITS(both.records) == {"east.1": east, "west.1": west}
    assert not any(record.lost for record in both.records)


@pytest.mark.gloo
def test_an_island_that_dies_before_its_delta_is_whole_is_left_out(tmp_path: Path) -> None:
    """Of an exchange that it had begun nothing is merged, and its samples are trained again."""
    both = Together(tmp_path, overlap=OVERLAP, minimum=1, patience=2)
    slow = {"minimum": 2, "max_bandwidth": 100}
    both.start("west", main=partial(mains.train, die_at=SENT_AT + 1), options=slow)
    both.await_that(lambda exchange: exchange.joined())
    both.start("east")
    both.end("west", "died")
    east, records = results(both.end("east")), both.records
    assert records[1].lost == ("west.1",)
    assert list((both.store / "sent" / "00000001").iterdir()) == [both.store / "sent" / "00000001" / "east.1.json"]
    assert BITS(records)["east.1"] == east
    assert account(records).whole


@pytest.mark.gloo
def test_an_island_that_dies_after_its_delta_is_whole_is_merged_once_more(tmp_path: Path) -> None:
    """By the outer step that it was sent for, which comes after its death; the one after leaves it out."""
    both, go = Together(tmp_path, overlap=OVERLAP, minimum=1, patience=8), tmp_path / "go"
    dies = partial(mains.train, wait_at=(SENT_AT + 1, str(go)), die_at=mains.EVERY)
    both.start("west", main=dies, options={"minimum": 2})
    both.await_that(lambda exchange: exchange.joined())
    both.start("east", main=partial(mains.train, wait_at=(SENT_AT + 1, str(go))))
    both.await_that(lambda exchange: exchange.sent_by(1, "west.1"))
    go.touch()
    both.end("west", "died")
    east, records = results(both.end("east")), both.records
    assert [one.island for one in records[1].merged] == ["east.1", "west.1"]
    assert records[2].lost == ("west.1",)
    assert BITS(records)["east.1"] == east
    assert account(records).whole


@pytest.mark.gloo
def test_an_island_that_joins_within_an_exchange_waits_for_the_next_outer_step(tmp_path: Path) -> None:
    """The record under way was sealed before it came: it begins with the next one's outer parameters."""
    both, go = Together(tmp_path, overlap=OVERLAP, minimum=1), tmp_path / "go"
    both.start("east", main=partial(mains.train, wait_at=(SENT_AT + 1, str(go))))
    both.await_that(lambda exchange: exchange.sealed(1))
    both.start("west", Layout(pp=2, dp=1))
    both.await_that(lambda exchange: len(exchange.joined()) == 2)
    go.touch()
    east, west = results(both.end("east")), results(both.end("west"))
    records = both.records
    assert [record.admitted for record in records] == [("east.1",), (), ("west.1",), (), ()]
    assert BITS(records) == {"east.1": east, "west.1": west}
    assert account(records).whole


def broken_off(run: Run, *, after: int) -> None:
    """Train, and return within a round."""
    model = run.shard(mains.build, blocks="blocks", seed=mains.SEED)
    optimizer, _ = mains.tools(model)
    batches = run.batches(Sentences(), global_batch=mains.GLOBAL_BATCH, micro_batch=mains.MICRO_BATCH)
    run.restore(model=model, optimizer=optimizer, batches=batches)
    for batch in batches.until(step=mains.EVERY):
        if run.steps == after:
            return
        run.step(optimizer, loss=run.backward(model, batch, loss_fn))


def alone(folder: Path, main: Any, **options: Any) -> None:
    """Run an island in this process, where another one is a member that never sends anything."""
    exchange = Exchange(open_store(str(folder / "between")))
    exchange.join("west.1", "of another job")
    given = {"every": mains.EVERY, "overlap": OVERLAP, "patience": 60, "longest": 60} | options
    run_alone(main, islands=Islands(store=folder / "between", minimum=2, **given), name="east", threads=1)


def test_a_script_that_returns_within_an_exchange_leaves_nothing_running(tmp_path: Path) -> None:
    """Nor does it wait for the islands that the exchange waits for."""
    alone(tmp_path, partial(broken_off, after=SENT_AT + 1))
    assert not [thread for thread in threading.enumerate() if thread.name == "elastic3d-islands"]
    assert Exchange(open_store(str(tmp_path / "between"))).left() == {"east.1"}


def test_what_an_exchange_ends_with_is_raised_at_its_outer_step(tmp_path: Path) -> None:
    """Here that the others never came."""
    with pytest.raises(StateError, match=r"outer step 1 waits for west.1, for .* Nothing is lost"):
        alone(tmp_path, mains.train, patience=0.1, longest=0.5)
    assert not [thread for thread in threading.enumerate() if thread.name == "elastic3d-islands"]

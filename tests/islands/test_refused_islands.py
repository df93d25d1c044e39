"""What makes no sense is refused, early and in words, before anything is merged."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpointing import open_store
from elastic3d.data import Growing
from elastic3d.errors import ConfigurationError, NotFinite, StateError, UsageError
from elastic3d.islands import Islands
from elastic3d.islands.admission import Admission
from elastic3d.islands.exchange import Exchange
from elastic3d.islands.fragments import fragments_of
from elastic3d.training import Run, run_alone
from tests.islands import mains
from tests.parallel.models import Model, Sentences, loss_fn


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"every": 0}, r"every=0\): give a whole number, 1 or more"),
        ({"every": 2.5}, r"every=2.5\): give a whole number"),
        ({"minimum": 0}, r"minimum=0\): give a whole number, 1 or more"),
        ({"store": ""}, r"store=''\): give a URL"),
        ({"store": "s3:bucket"}, r"a URL has '://'"),
        ({"name": "a/b"}, r"name='a/b'\): take letters"),
        ({"outer": "adam"}, r"outer='adam'\): give 'nesterov' or 'average'"),
        ({"outer": "average", "lr": 0.5}, r"the mean has no lr; leave it out"),
        ({"lr": 0}, r"lr=0\): give a number above 0"),
        ({"momentum": 1.0}, r"momentum=1.0\): give a number from 0 on, below 1"),
        ({"fragments": 3}, r"every=10, fragments=3\): fragments divide every"),
        ({"overlap": -1}, r"overlap=-1\): give a whole number, 0 or more"),
        ({"overlap": 10}, r"overlap=10, every=10, fragments=1\): .*10 inner steps later .*take fewer than 10"),
        ({"overlap": 5, "fragments": 2}, r"overlap=5, every=10, fragments=2\): .*5 inner steps later .*fewer than 5"),
        ({"mixing": 0.5}, r"mixing=0.5\): without overlap .* leave it out, or give overlap="),
        ({"mixing": 1, "overlap": 2}, r"mixing=1\): give a number from 0 on, below 1"),
        ({"patience": "soon"}, r"patience='soon'"),
        ({"replay": "east"}, r"replay='east'\): give an island as the records name it"),
        ({"keep": 0}, r"keep=0\): give a whole number, 1 or more"),
        ({"max_bandwidth": "fast"}, r"max_bandwidth='fast': give bytes per second"),
        ({"key": 3}, r"key=3\): give a path"),
    ],
)
def test_options_that_make_no_sense_are_refused(given: dict[str, Any], why: str) -> None:
    """Where they are written."""
    with pytest.raises(UsageError, match=why):
        Islands(**({"store": "/tmp/x", "every": 10} | given))


def test_a_rendezvous_id_that_is_no_name_is_refused() -> None:
    """Another name helps."""
    with pytest.raises(UsageError, match=r"'a b' is no name of an island; give elastic3d.Islands\(name="):
        Islands(store="/tmp/x", every=10).named("a b")
    assert Islands(store="/tmp/x", every=10, name="east").named("a b") == "east"


def alone(folder: Path, main: Any = mains.train, name: str = "east", **options: Any) -> Run:
    """Run an island in this process."""
    given = {"every": mains.EVERY, "patience": 0.1, "longest": 0.5} | options
    return run_alone(main, islands=Islands(store=folder / "between", **given), name=name, threads=1)


def other(run: Run, **options: Any) -> None:
    """Train with other batches than the rest."""
    model = run.shard(mains.build, blocks="blocks", seed=options.pop("weights", mains.SEED))
    optimizer = torch.optim.AdamW(model.parameters(), lr=mains.RATE)
    steps, extra = options.pop("steps", mains.EVERY), options.pop("extra", None)
    meanwhile = options.pop("meanwhile", lambda: None)
    given = {"global_batch": mains.GLOBAL_BATCH, "micro_batch": mains.MICRO_BATCH, "seed": mains.DATA_SEED} | options
    batches = run.batches(given.pop("data", Sentences()), **given)
    run.restore(model=model, optimizer=optimizer, batches=batches, extra=extra)
    for batch in batches.until(step=steps):
        run.step(optimizer, loss=run.backward(model, batch, loss_fn))
        meanwhile()


@pytest.mark.parametrize(
    ("main", "options", "why"),
    [
        (partial(mains.train, depth=3), {}, r"the model's digest .* is '\w+' there, and '\w+' here"),
        (partial(other, weights=4), {}, r"the digest of the initial weights.*run.shard\(seed=\) is 3 there, and 4"),
        (partial(other, seed=4), {}, r"run.batches\(seed=\) is 11 there, and 4 here"),
        (partial(other, global_batch=8), {}, "global_batch is 4 there, and 8 here"),
        (mains.train, {"every": 6}, "every is 3 there, and 6 here"),
        (mains.train, {"lr": 0.5}, "the outer lr is 0.7 there, and 0.5 here"),
        (mains.train, {"overlap": 1}, "overlap is 0 there, and 1 here"),
        (mains.train, {"outer": "average"}, "the outer optimizer is 'nesterov' there, and 'average' here"),
    ],
)
def test_islands_that_train_something_else_are_refused(
    tmp_path: Path, main: Any, options: dict[str, Any], why: str
) -> None:
    """Before any step, with what differs."""
    alone(tmp_path, other)
    with pytest.raises(UsageError, match=why):
        alone(tmp_path, main, name="west", **options)


class Stream(torch.utils.data.IterableDataset[Any]):
    """Samples without numbers."""

    def __iter__(self) -> Any:
        return iter([Sentences()[0]])


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"data": Stream()}, "a stream, whose samples cannot be handed out"),
        ({"global_batch": Growing((0, 4), (2, 8))}, "a global batch that changes"),
        ({"exclude": [(0, 2)]}, "exclude=, whose positions are those of one run"),
        ({"extra": {"islands": torch.nn.Linear(2, 2)}}, "under which an island's own state is kept; take another"),
        ({"steps": 4}, r"until\(step=4\) ends within a round: islands merge every 3 steps.*; take 3"),
    ],
)
def test_a_script_that_islands_cannot_train_is_refused(tmp_path: Path, options: dict[str, Any], why: str) -> None:
    """With what would do instead."""
    with pytest.raises(UsageError, match=why):
        alone(tmp_path, partial(other, **options))


def test_too_few_islands_end_with_what_is_missing(tmp_path: Path) -> None:
    """After `longest`, and nothing was trained."""
    with pytest.raises(StateError, match=r"was not admitted for .*: 1 of at least 2 islands are there \(minimum=\)"):
        alone(tmp_path, minimum=2)


def test_an_outer_step_below_the_minimum_is_not_taken(tmp_path: Path) -> None:
    """The one that is left says so, and keeps its state."""
    exchange = Exchange(open_store(str(tmp_path / "between")))
    exchange.join("west.1", "of another job")
    with pytest.raises(StateError, match=r"outer step 1 waits for west.1, for .* Nothing is lost"):
        alone(tmp_path, minimum=2)
    assert exchange.sealed(1) is None


def test_a_second_job_of_one_name_is_refused(tmp_path: Path) -> None:
    """By the next outer step of the first one, which goes on."""
    exchange = Exchange(open_store(str(tmp_path / "between")))

    def main(run: Run) -> None:
        other(run, steps=mains.EVERY, meanwhile=lambda: exchange.join("east.2", "of another job"))

    alone(tmp_path, main)
    record = exchange.sealed(1)
    assert record is not None
    assert record.refused == ("east.2",)
    assert set(record.members) == {"east.1"}
    islands = Islands(store=tmp_path / "between", every=mains.EVERY)
    asking = Admission(exchange=exchange, islands=islands, name="east", token="of another job", island="east.2")
    with pytest.raises(
        UsageError, match=r"name='east'\): an island of that name is alive: it was merged at outer step 1"
    ):
        asking.look(0.0)


def test_a_replay_that_comes_to_other_bits_says_where(tmp_path: Path) -> None:
    """Here with another learning rate; and one of an island that never was, who there are."""
    alone(tmp_path)

    def main(run: Run) -> None:
        model = run.shard(mains.build, blocks="blocks", seed=mains.SEED)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2 * mains.RATE)
        batches = run.batches(Sentences(), global_batch=4, micro_batch=2, seed=mains.DATA_SEED)
        run.restore(model=model, optimizer=optimizer, batches=batches)
        for batch in batches.until(step=mains.EVERY):
            run.step(optimizer, loss=run.backward(model, batch, loss_fn))

    with pytest.raises(StateError, match=r"island east.1 came to other bits .* outer step 1, in parameter emb"):
        alone(tmp_path, main, replay="east.1")
    with pytest.raises(
        UsageError, match=r"replay='east.2'\): no outer step in .* admitted it; those that were are east.1"
    ):
        alone(tmp_path, replay="east.2")


def test_a_replay_writes_nothing_where_no_island_has_begun(tmp_path: Path) -> None:
    """Else the islands that begin there would have to have what it has."""
    with pytest.raises(UsageError, match=r"replay='east.1'\): no island has begun in "):
        alone(tmp_path, replay="east.1")
    assert not any((tmp_path / "between").rglob("*.json"))


def test_what_is_not_finite_is_not_merged(tmp_path: Path) -> None:
    """It would spoil the parameters of all."""

    def main(run: Run) -> None:
        model = run.shard(lambda: Model(depth=2, dropout=0.0), blocks="blocks", seed=mains.SEED)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        batches = run.batches(Sentences(), global_batch=4, micro_batch=2)
        run.restore(model=model, optimizer=optimizer, batches=batches)
        for batch in batches.until(step=mains.EVERY):
            run.step(optimizer, loss=run.backward(model, batch, loss_fn))
            with torch.no_grad():
                next(model.parameters()).fill_(float("nan"))

    with pytest.raises(NotFinite, match="is not finite before outer step 1, and is not merged"):
        alone(tmp_path, main)


def test_a_damaged_record_is_named(tmp_path: Path) -> None:
    """It is not taken for one of another run."""
    exchange = Exchange(open_store(str(tmp_path / "between")))
    exchange.store.put("setup.json", b"{")
    with pytest.raises(ConfigurationError, match=r"setup.json in .* cannot be read"):
        alone(tmp_path)


def test_a_store_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    """Before any step."""
    (tmp_path / "between").write_text("no folder")
    with pytest.raises(ConfigurationError, match=r"elastic3d.Islands\(store=.*cannot be used"):
        alone(tmp_path)


def test_fragments_are_neighbours_of_about_equal_size() -> None:
    """And none is empty."""
    from checkpointing.format.tiles import TensorSpec

    specs = [TensorSpec(key=f"p{number}", dtype="float32", shape=(10 + number,)) for number in range(8)]
    homes = fragments_of(specs, 3)
    assert list(homes.values()) == sorted(homes.values())
    assert [list(homes.values()).count(number) for number in range(3)] == [3, 3, 2]
    with pytest.raises(UsageError, match=r"fragments=9\): of this model's 8 parameters"):
        fragments_of(specs, 9)

"""What a script keeps of its own goes with the run's state: what is refused, and what begins, goes on or is dropped."""

from __future__ import annotations

import functools
import io
import math
import pickle
import warnings
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from elastic3d.errors import StateUnfit, UsageError
from elastic3d.training import Run, run_alone
from tests.parallel.extra_mains import Counted
from tests.parallel.models import Model, Sentences, loss_fn
from tests.training.lives import live


class Other(Counted):
    """Another class than that of the saved state."""


class Picky(Counted):
    """It takes no state with `seen` above 2."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["seen"] > 2:
            raise RuntimeError("seen too much")


def train(
    run: Run, extra: dict[str, Any] | None, *, steps: int = 6, accept: Any = (), raises: int = -1, early: bool = False
) -> Run:
    """Train up to a step, counting in every extra after each step; raises: after a step, before anything is counted.

    early: count before `run.step`.
    """
    model = run.shard(Model, blocks="blocks")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    batches = run.batches(Sentences(), global_batch=4, micro_batch=2)
    run.restore(model=model, optimizer=optimizer, batches=batches, extra=extra, accept=accept)
    for batch in batches.until(step=steps):
        loss = run.backward(model, batch, loss_fn)
        if not early:
            run.step(optimizer, loss=loss)
        if run.steps == raises:
            raise ZeroDivisionError
        for one in (extra or {}).values():
            one.state["seen"] += 1
        if early:
            run.step(optimizer, loss=loss)
    return run


def leave(tmp_path: Path, extra: dict[str, Any] | None, after: int = 3, **options: Any) -> Path:
    """Train some steps and leave; return the folder of the state."""
    folder = tmp_path / f"state{len(list(tmp_path.iterdir()))}"
    folder.mkdir()
    live(lambda run: train(run, extra, steps=99, **options), keep=folder, leave_at=after)
    return folder


class Stateless:
    """It has half of what is needed."""

    def state_dict(self) -> dict[str, Any]:
        return {}


def of_the_model(run: Run, model: torch.nn.Module, optimizer: Any) -> Any:
    return torch.optim.SGD(model.parameters(), lr=1.0)


@pytest.mark.parametrize(
    ("name", "make", "why"),
    [
        ("ema/1", lambda *_: Counted(), r"extra= has the name 'ema/1': take letters"),
        ("", lambda *_: Counted(), r"extra= has the name ''"),
        ("x", lambda *_: 3, r"extra='x' is int, which has no state_dict: give an object with"),
        ("x", lambda *_: Stateless(), r"extra='x' is Stateless, which has no load_state_dict"),
        ("x", lambda *_: Counted, r"extra='x' is type, which has no state_dict"),
        ("x", lambda *_: Counted(fn=print), r"extra\['x'\]\['fn'\] is builtin_function_or_method, which is no state"),
        (
            "x",
            lambda *_: Counted(a={"log": io.StringIO()}),
            r"extra\['x'\]\['a'\]\['log'\] is StringIO, which is no state",
        ),
        ("x", lambda *_: Counted(a=torch.eye(2).to_sparse()), r"extra\['x'\]\['a'\] is a tensor of the layout"),
        ("m", lambda run, model, optimizer: model, r"extra='m' is given to it already, and is kept as that"),
        ("o", lambda run, model, optimizer: optimizer, r"extra='o' is given to it already"),
        (
            "o",
            of_the_model,
            r"extra='o' is an optimizer of parameters of the model.* one optimizer with several groups",
        ),
    ],
)
def test_what_cannot_be_kept_is_refused_by_name(name: str, make: Callable[..., Any], why: str) -> None:
    """At run.restore, before anything is loaded."""

    def main(run: Run) -> None:
        model = run.shard(Model, blocks="blocks")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        batches = run.batches(Sentences(), global_batch=4, micro_batch=2)
        extra = {name: make(run, model, optimizer)}
        run.restore(model=model, optimizer=optimizer, batches=batches, extra=extra)

    with pytest.raises(UsageError, match=why):
        run_alone(main)


def test_what_becomes_what_cannot_be_kept_is_refused_where_it_would_be_saved(tmp_path: Path) -> None:
    """With its name too."""
    counted = Counted(seen=0)

    def main(run: Run) -> None:
        counted.state["made"] = None
        train(run, {"x": counted}, steps=1)
        counted.state["made"] = lambda: None
        run.finish()

    with pytest.raises(StateUnfit, match=r"extra\['x'\]\['made'\] is function"):
        live(lambda run: main(_snapshotting(run)), keep=tmp_path)


def _snapshotting(run: Run) -> Run:
    """Have the next end of a run take a snapshot, as in a job with a store."""
    run.finish = functools.partial(run._snapshot, checkpoint=False, wait=True)  # type: ignore[method-assign, assignment]
    return run


@pytest.mark.parametrize("early", [False, True])
def test_what_a_script_does_after_a_step_belongs_to_that_step(tmp_path: Path, early: bool) -> None:
    """As does what it does before: where the process leaves and another one goes on, nothing is missing or doubled."""
    whole = Counted(seen=0, table={"w": torch.arange(3.0)})
    live(lambda run: train(run, {"x": whole}))
    assert whole.state["seen"] == 6
    state = leave(tmp_path, {"x": Counted(seen=0, table={"w": torch.arange(3.0)})}, early=early)
    again = Counted(seen=17, table={"w": torch.zeros(3)})
    run = live(lambda run: train(run, {"x": again}, early=early), take=state)
    assert run._port.report.restored == ("memory", 3, 1)
    assert run._port.report.detail == ""
    assert again.state["seen"] == 6
    assert torch.equal(again.state["table"]["w"], torch.arange(3.0))


def test_dictionaries_come_back_as_those_that_the_object_has(tmp_path: Path) -> None:
    """With their classes; and in their order, by which a script may pair their tensors with parameters."""

    def tallied(**seen: int) -> Counted:
        one = Counted(seen=0, tally=defaultdict(int, seen), table=OrderedDict(b=torch.ones(1), n=1, a=torch.zeros(1)))
        one.state["last"] = {}
        return one

    saved = tallied(x=3)
    saved.state["last"] = OrderedDict(z=1, y=2)
    state = leave(tmp_path, {"t": saved})
    for file in state.iterdir():  # as a checkpoint in a store has them
        facts, content = pickle.loads(file.read_bytes())
        file.write_bytes(pickle.dumps((facts, sorted(content, key=lambda part: part[0].key))))
    again = tallied()
    live(lambda run: train(run, {"t": again}), take=state)
    tally, table = again.state["tally"], again.state["table"]
    tally["y"] += 1
    assert tally == {"x": 3, "y": 1}
    assert list(table) == ["b", "n", "a"]
    table.move_to_end("b")
    assert list(again.state["last"]) == ["z", "y"]


class Stage(StrEnum):
    """Of a curriculum."""

    EASY = "easy"
    HARD = "hard"


class Best(NamedTuple):
    """The best step."""

    step: int
    loss: float


def test_named_tuples_and_enums_come_back_as_those_that_the_object_has(tmp_path: Path) -> None:
    """So that a script finds its names and members in the first step after a death, too; whatever else is there."""

    def made(stage: Stage, best: Best, **more: Any) -> Counted:
        pair = [Best(0, math.inf), stage]
        return Counted(seen=0, stage=stage, best=best, pair=pair, shape=torch.Size([best.step]), plain=(1, 2.5), **more)

    saved = made(
        Stage.HARD, Best(2, 0.5), table={"w": torch.ones(1)}, since=Stage.HARD, other="impossible", list=[1, 2]
    )
    state = leave(tmp_path, {"c": saved})
    again = made(Stage.EASY, Best(0, 1.0), table={}, since=None, other=Stage.EASY, list=[Best(0, 1.0)])
    live(lambda run: train(run, {"c": again}), take=state)
    assert again.state["stage"] is Stage.HARD
    assert again.state["best"].loss == 0.5
    assert again.state["pair"][0].step == 0
    assert again.state["pair"][1] is Stage.HARD
    assert again.state["shape"].numel() == 2
    assert again.state["plain"] == (1, 2.5)
    assert (again.state["since"], again.state["other"], again.state["list"]) == ("hard", "impossible", [1, 2])


def test_what_comes_back_as_another_class_is_said_where_it_is_saved(tmp_path: Path) -> None:
    """Once for each place: a list that is filled in training has no class to go by where the object is made anew."""
    saved = Counted(seen=0, best=[], tally=defaultdict(int), stages={}, counted=Counter())

    def main(run: Run) -> None:
        train(run, {"c": saved}, steps=1)
        saved.state["best"] += [Best(1, 0.5), Best(2, 0.25)]
        saved.state["stages"]["last"] = Stage.HARD
        saved.state["counted"]["hard"] += 1
        with pytest.warns(UserWarning, match=r"extra\['c'\]\['best'\]\[0\] is Best, .* and 2 more are .* plain tuple"):
            run._snapshot(checkpoint=False, wait=True)
        saved.state["best"][0] = saved.state["best"].pop()
        run._snapshot(checkpoint=False, wait=True)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        live(main, keep=tmp_path)
    again = Counted(seen=0, best=[], tally=defaultdict(int), stages={}, counted=Counter())
    live(lambda run: train(run, {"c": again}, steps=1), take=tmp_path)
    assert type(again.state["best"][0]) is tuple
    assert type(again.state["stages"]["last"]) is str


def test_a_step_after_which_the_script_raised_leaves_no_snapshot(tmp_path: Path) -> None:
    """What it would have done after the step is in no state, so that such a state must not be gone on from."""
    with pytest.raises(ZeroDivisionError):
        live(lambda run: train(run, {"x": Counted(seen=0)}, raises=3), keep=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_one_that_the_state_lacks_begins_as_it_is_and_that_is_reported(tmp_path: Path) -> None:
    """The state of others is taken."""
    state = leave(tmp_path, {"x": Counted(seen=0)})
    x, new = Counted(seen=0), Counted(seen=100)
    run = live(lambda run: train(run, {"x": x, "new": new}), take=state)
    assert (x.state["seen"], new.state["seen"]) == (6, 103)
    assert run._port.report.detail == "extra='new' is not in the saved state, and begins as it is"


def test_one_that_the_script_dropped_is_refused_unless_it_says_so(tmp_path: Path) -> None:
    """Then the ledger has it, and what it kept is in no later state."""
    state = leave(tmp_path, {"x": Counted(seen=0, w=torch.ones(2)), "y": Counted(seen=0)})
    for extra in (None, {"y": Counted(seen=0)}):
        with pytest.raises(
            StateUnfit, match=r"has extra='x', of the class Counted, and here .* not given .*accept='extra'"
        ):
            live(functools.partial(train, extra=extra), take=state)
    y = Counted(seen=0)
    later = tmp_path / "later"
    later.mkdir()
    live(lambda run: train(run, {"y": y}, accept="extra"), take=state, keep=later, leave_at=2)
    run = live(lambda run: train(run, {"y": y}), take=later)
    assert y.state["seen"] == 6
    assert [line.changed for line in run.ledger] == ["", "extra='x' is kept no more from here on", ""]


def test_one_of_another_class_is_refused_or_begins_as_it_is(tmp_path: Path) -> None:
    """Its state means nothing to another class."""
    state = leave(tmp_path, {"x": Counted(seen=0)})
    with pytest.raises(StateUnfit, match=r"extra='x', of the class Counted, and here it is Other"):
        live(lambda run: train(run, {"x": Other(seen=0)}), take=state)
    other = Other(seen=50)
    run = live(lambda run: train(run, {"x": other}, accept=["extra"]), take=state)
    assert other.state["seen"] == 53
    assert "extra='x' was Counted and is Other from here on, and begins as it is" in run._port.report.detail


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: Counted(seen=0, w=torch.ones(3)), r"extra\['x'\]\['w'\] is float32\[2\] .*, and float32\[3\] here"),
        (
            lambda: Counted(seen=0, w=torch.ones(2).long()),
            r"extra\['x'\]\['w'\] is float32\[2\] .*, and int64\[2\] here",
        ),
        (
            lambda: Picky(seen=0, w=torch.ones(2)),
            r"extra='x': Picky.load_state_dict did not take .* RuntimeError: seen too much",
        ),
    ],
)
def test_a_state_that_does_not_fit_is_refused_by_name(tmp_path: Path, make: Callable[[], Counted], why: str) -> None:
    """Where tensors have other shapes or dtypes, and where the object itself says no."""
    state = leave(tmp_path, {"x": type(make())(seen=0, w=torch.ones(2))})
    with pytest.raises(StateUnfit, match=why):
        live(lambda run: train(run, {"x": make()}), take=state)


def test_a_module_of_its_own_is_kept_like_any_other_object(tmp_path: Path) -> None:
    """With its buffers, and loaded by torch's own rules: what lacks is named by torch."""

    def main(run: Run, head: torch.nn.Module) -> torch.nn.Module:
        model = run.shard(Model, blocks="blocks")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        batches = run.batches(Sentences(), global_batch=4, micro_batch=2)
        run.restore(model=model, optimizer=optimizer, batches=batches, extra={"head": head})
        for batch in batches.until(step=4):
            run.step(optimizer, loss=run.backward(model, batch, loss_fn))
            head(torch.ones(2, 3) * run.steps)
        return head

    kept = live(lambda run: main(run, torch.nn.BatchNorm1d(3)))
    live(lambda run: main(run, torch.nn.BatchNorm1d(3)), keep=tmp_path, leave_at=2)
    again = live(lambda run: main(run, torch.nn.BatchNorm1d(3)), take=tmp_path)
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in kept.state_dict().items())
    with pytest.raises(StateUnfit, match=r"extra='head': .*Unexpected key\(s\) in state_dict: .*running_mean"):
        live(lambda run: main(run, torch.nn.BatchNorm1d(3, track_running_stats=False)), take=tmp_path)

"""What a script may change between two lives of its run, where it says so: it goes on, and the ledger has it."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, StepLR

from elastic3d.data import Order, check
from elastic3d.errors import StateUnfit, UsageError
from elastic3d.training import Run, identity
from elastic3d.values import from_json, to_json
from tests.parallel.models import Model, Sentences, loss_fn
from tests.training.lives import live


class Texts(Sentences):
    """So many sentences, which are numbered alike however many there are."""

    def __init__(self, length: int, fingerprint: str = "") -> None:
        super().__init__()
        self.count, self.fingerprint = length, fingerprint
        self.given: list[int] = []

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        self.given.append(index)
        return super().__getitem__(index)


def train(
    run: Run,
    texts: Texts,
    *,
    steps: int,
    schedule: Any = None,
    accept: Any = (),
    lr: float = 0.5,
    micro_batch: int = 2,
) -> tuple[Run, Any, list[float]]:
    """Train up to a step; return the run, its order of samples, and the learning rate of each step that was made."""
    model = run.shard(Model)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    planned = schedule(optimizer) if schedule is not None else None
    batches = run.batches(texts, global_batch=4, micro_batch=micro_batch)
    run.restore(model=model, optimizer=optimizer, schedule=planned, batches=batches, accept=accept)
    texts.given.clear()
    rates = []
    for batch in batches.until(step=steps):
        rates.append(optimizer.param_groups[0]["lr"])
        run.step(optimizer, planned, loss=run.backward(model, batch, loss_fn))
    return run, batches.order, rates


def cosine(optimizer: Any) -> Any:
    return CosineAnnealingLR(optimizer, T_max=10)


def halving(optimizer: Any) -> Any:
    return StepLR(optimizer, step_size=1, gamma=0.5)


def leave(tmp_path: Path, name: str, texts: Texts, after: int = 3, take: Path | None = None, **options: Any) -> Path:
    """Train some steps and leave; return the folder of the state."""
    (tmp_path / name).mkdir()
    live(lambda run: train(run, texts, steps=99, **options), keep=tmp_path / name, take=take, leave_at=after)
    return tmp_path / name


def test_a_data_set_that_has_grown_is_gone_on_with_where_the_script_says_so(tmp_path: Path) -> None:
    """From there on each of its samples comes once per epoch; what was consumed before stays accounted for."""
    state = leave(tmp_path, "small", Texts(5))
    with pytest.raises(StateUnfit, match=r'length=5 .* now has 11: .* run.restore\(..., accept="data"\)'):
        live(lambda run: train(run, Texts(11), steps=9), take=state)
    texts = Texts(11)
    run, order, _ = live(lambda run: train(run, texts, steps=14, accept="data"), take=state)
    assert order.earlier == ((12, 5),)
    assert Counter(texts.given) == dict.fromkeys(range(11), 4)  # 11 steps of 4
    assert [line.changed for line in run.ledger] == ["", "the data set had 5 samples and has 11 from here on"]
    account = check(run.ledger, order)
    assert account.whole
    assert account.consumed == 14 * 4


def test_a_later_generation_goes_on_with_the_grown_data_set(tmp_path: Path) -> None:
    """To the same bits as one that never ended, whether or not the script still asks; and it may grow again."""
    small = leave(tmp_path, "small", Texts(5))
    whole, _, _ = live(lambda run: train(run, Texts(11), steps=9, accept=["data"]), take=small)
    grown = leave(tmp_path, "grown", Texts(11), take=small, accept=("data",))
    for accept in ((), "data"):
        run, order, _ = live(partial(train, texts=Texts(11), steps=9, accept=accept), take=grown)
        assert (run.digest(), order.earlier) == (whole.digest(), ((12, 5),))
        assert [line.changed != "" for line in run.ledger] == [False, True, False]
        assert check(run.ledger, order).whole
    run, order, _ = live(lambda run: train(run, Texts(17), steps=9, accept="data"), take=grown)
    assert order.earlier == ((12, 5), (24, 11))
    assert check(run.ledger, order).whole
    assert from_json(Order, to_json(order)) == order


def test_what_has_changed_is_in_the_ledger_though_its_generation_makes_no_step(tmp_path: Path) -> None:
    """A node dies right after the state was restored: the next generation goes on from the snapshot of that."""
    small = leave(tmp_path, "small", Texts(5))
    (tmp_path / "dead").mkdir()
    live(lambda run: train(run, Texts(11), steps=3, accept="data"), keep=tmp_path / "dead", take=small)
    run, _, _ = live(lambda run: train(run, Texts(11), steps=6), take=tmp_path / "dead")
    assert [line.changed for line in run.ledger] == ["", "the data set had 5 samples and has 11 from here on"]


def test_other_files_of_a_data_set_are_gone_on_with_likewise(tmp_path: Path) -> None:
    """As many samples of other files are taken in the epoch that is under way."""
    state = leave(tmp_path, "old", Texts(5, "old.bin"))
    with pytest.raises(StateUnfit, match=r"go back to the old files, .* accept=\"data\""):
        live(lambda run: train(run, Texts(5, "new.bin"), steps=5), take=state)
    run, order, _ = live(lambda run: train(run, Texts(5, "new.bin"), steps=5, accept="data"), take=state)
    assert order.earlier == ()
    assert run.ledger[-1].changed == "the data set was old.bin and is new.bin from here on"


class Others(Texts):
    """Other contents under the same numbers."""

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index + 100)


def test_other_samples_under_the_same_numbers_are_noticed_and_gone_on_with(tmp_path: Path) -> None:
    """By the run's first micro-batch, where the data set has no fingerprint; once, since the next state has it."""
    state = leave(tmp_path, "before", Texts(11))
    run, _, _ = live(lambda run: train(run, Others(11), steps=5), take=state)
    changed = run.ledger[-1].changed
    assert "first micro-batch is made of the same numbers of the data set as before, and is another one" in changed
    assert changed in run._port.report.detail
    after = leave(tmp_path, "after", Others(11), take=state)
    run, _, _ = live(lambda run: train(run, Others(11), steps=9), take=after)
    assert [line.changed for line in run.ledger] == ["", changed, ""]
    run, _, _ = live(lambda run: train(run, Others(11), steps=5, micro_batch=4), take=state)
    assert "micro-batch is made" not in run._port.report.detail, "micro-batches of another size tell nothing"


@pytest.mark.parametrize(
    ("before", "after", "rates"),
    [
        (None, halving, [0.5, 0.25, 0.125]),
        (halving, None, [0.5, 0.5, 0.5]),
        (cosine, halving, [0.5, 0.25, 0.125]),
    ],
    ids=["added", "dropped", "replaced"],
)
def test_a_schedule_may_change_where_the_script_says_so(before: Any, after: Any, rates: Any, tmp_path: Path) -> None:
    """It begins anew with the script's learning rate; the generations after it go on with it."""
    state = leave(tmp_path, "before", Texts(5), schedule=before)
    with pytest.raises(StateUnfit, match=r'as its schedule, .* run.restore\(..., accept="schedule"\)'):
        live(lambda run: train(run, Texts(5), steps=6, schedule=after), take=state)
    run, _, found = live(lambda run: train(run, Texts(5), steps=6, schedule=after, accept="schedule"), take=state)
    assert found == rates
    assert "the schedule was" in run.ledger[-1].changed
    middle = leave(tmp_path, "after", Texts(5), after=1, take=state, schedule=after, accept="schedule")
    again, _, found = live(lambda run: train(run, Texts(5), steps=6, schedule=after, accept="schedule"), take=middle)
    assert found == rates[1:]
    assert again.digest() == run.digest()
    assert [line.changed != "" for line in again.ledger] == [False, True, False]


def test_only_what_may_change_can_be_accepted(tmp_path: Path) -> None:
    """A name that is none is refused, and another optimizer is refused whatever is named."""
    for wrong in ("optimizer", ["data", "seed"], [3]):
        with pytest.raises(UsageError, match="takes 'config', 'data', 'schedule', 'extra', 'stop', 'weights'; "):
            identity.accepted(wrong)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="earlier data sets"):
        Order(length=5, global_batch=2, micro_batch=1, seed=0, earlier=((4, 0),))
    state = leave(tmp_path, "state", Texts(5))

    def stream(run: Run) -> None:
        model = run.shard(Model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        batches = run.batches(Endless(), global_batch=4, micro_batch=2)
        run.restore(model=model, optimizer=optimizer, batches=batches, accept="data")

    with pytest.raises(StateUnfit, match=r"length=5 and run\.batches now has None"):
        live(stream, take=state)


class Endless:
    """A stream, which has no positions to go on from."""

    def __iter__(self) -> Any:
        while True:
            yield Sentences()[0]

"""Runs whose global batch follows the gradient's noise, one generation after the other."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from elastic3d.data import Adaptive, Growing, Mixture, Order, Packed, Stratified
from elastic3d.data.ledger import check
from elastic3d.data.noise import NoiseScale
from elastic3d.errors import StateError, UsageError
from elastic3d.training import Run
from elastic3d.training.tiers import KeepersAndStore
from elastic3d.values import Layout
from tests.parallel import adaptive_mains
from tests.parallel.adaptive_mains import Trained
from tests.parallel.models import LENGTH, VOCABULARY, Sentences
from tests.parallel.worlds import Orders, run_world
from tests.training.lives import live
from tests.training.test_going_back import Keeping, WentBack, following

WIDTH, NUMBER, LONGEST = 12, 1_000, 3
AT = torch.linspace(-3.0, 3.0, WIDTH)


class Middle(nn.Module):
    """A point, whose loss is half its squared distance from each sample: the gradient's noise is the samples'."""

    def __init__(self) -> None:
        super().__init__()
        self.at = nn.Parameter(AT.clone())

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        return self.at - samples


def points() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return samples of up to three points, and for each point whether it is one."""
    drawn = torch.randn(NUMBER, LONGEST, WIDTH, generator=torch.Generator().manual_seed(4)) * 3.0
    return [(one, (torch.arange(LONGEST) <= number % LONGEST).float()) for number, one in enumerate(drawn)]


def half_squares(output: torch.Tensor, there: torch.Tensor) -> torch.Tensor:
    """Return the mean over samples of the loss of their first points."""
    return output[:, 0].square().sum(1).mean() / 2


def summed(output: torch.Tensor, there: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum of the losses of all points, and how many there are."""
    return (output.square().sum(2) * there).sum() / 2, there.sum().long()


def known(points: torch.Tensor) -> float:
    """Return tr(C) / |G|^2 of the gradients of single points."""
    return float(points.double().var(0).sum() / (AT.double() - points.double().mean(0)).square().sum())


def measured(run: Run, *, loss: Any, leaf: int = 1, precision: str = "fp32") -> float:
    """Return the noise scale that 80 steps of 16 samples show, over a model that stays where it is."""
    model = run.shard(Middle, leaf=leaf, precision=precision)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    policy = Adaptive(16, 64, measured_every=1, memory=10**6)
    batches = run.batches(points(), global_batch=policy, micro_batch=2, seed=3)
    run.restore(model=model, optimizer=optimizer, batches=batches)
    for batch in batches.until(step=80):
        run.step(optimizer, loss=run.backward(model, batch, loss))
    scale = run._port.records[-1].noise_scale  # type: ignore[attr-defined]
    assert scale is not None
    return float(scale)


@pytest.mark.parametrize("leaf", [1, 2])
def test_the_noise_scale_is_the_one_that_is_known(leaf: int) -> None:
    """Within 10 % of tr(C) / |G|^2 over all samples, from micro-batches and from leaves."""
    found = live(partial(measured, loss=half_squares, leaf=leaf))
    assert found == pytest.approx(known(torch.stack([one[0] for one, _ in points()])), rel=0.1)


@pytest.mark.gloo
def test_a_loss_scale_does_not_show_in_it() -> None:
    """In fp16, whose gradients are scaled, on several ranks."""
    layout = Layout(pp=1, dp=3, zero=2)
    main = partial(measured, loss=half_squares, precision="fp16")
    (found,) = {report.result for report in run_world(main, Orders(layout=layout))}
    assert found == pytest.approx(known(torch.stack([one[0] for one, _ in points()])), rel=0.1)


def test_the_noise_scale_of_tokens_is_the_one_that_is_known() -> None:
    """Of losses that are sums over tokens: in samples of the mean number of tokens."""
    there = [int(there.sum()) for _, there in points()]
    tokens = torch.cat([one[:count] for (one, _), count in zip(points(), there, strict=True)])
    found = live(partial(measured, loss=summed))
    assert found == pytest.approx(known(tokens) / (sum(there) / NUMBER), rel=0.1)


def whole(main: Any, folder: Path, *, leaves_at: tuple[int, ...]) -> Any:
    """Return what a run comes to that begins again from its own states after so many steps of each generation."""
    folder.mkdir()
    for count in leaves_at:
        assert live(main, keep=folder, take=folder, leave_at=count) is None
    return live(main, take=folder)


@pytest.mark.parametrize("leaves_at", [(2,), (3,), (2, 2, 1)], ids=str)
def test_a_run_that_begins_again_changes_at_the_same_steps(leaves_at: tuple[int, ...], tmp_path: Path) -> None:
    """Also where its state is the one before which a change was decided: its reason is in the ledger once."""
    main = partial(adaptive_mains.train, steps=8)
    quiet: Trained = live(main)
    assert quiet.sizes == (8, 8, 16, 16, 28, 28, 28, 28)
    again: Trained = whole(main, tmp_path / "states", leaves_at=leaves_at)
    assert (again.digest, again.sizes, again.whole) == (quiet.digest, quiet.sizes, True)
    assert again.noise == quiet.noise[-len(again.noise) :]
    assert list(filter(None, again.changed)) == list(filter(None, quiet.changed))


@pytest.mark.parametrize("rule", ["linear", "sqrt", "adascale", None])
def test_learning_rates_are_on_top_of_the_schedule(rule: str | None) -> None:
    """Of every step's update, by the rule; the schedule's own state never shows it."""
    policy = Adaptive(8, 28, multiple=4, every=2, measured_every=1, memory=2, margin=0.05, learning_rate=rule)
    plain = live(partial(adaptive_mains.train, policy=8)).rates
    made: Trained = live(partial(adaptive_mains.train, policy=policy))
    factors = [rate / own for rate, own in zip(made.rates, plain, strict=True)]
    wanted = {"linear": [size / 8 for size in made.sizes], "sqrt": [(size / 8) ** 0.5 for size in made.sizes]}
    if rule == "adascale":
        assert all(1.0 - 1e-9 <= factor <= size / 8 + 1e-9 for factor, size in zip(factors, made.sizes, strict=True))
        assert max(factors) > 2.0
    else:
        assert factors == pytest.approx(wanted.get(rule or "", [1.0] * 8))


class Mixed(Sentences):
    fingerprint = "mixed"


@pytest.mark.parametrize(
    "dataset",
    [
        lambda: Mixture({"a": Sentences(), "b": Mixed()}, weights={"a": 0.7, "b": 0.3}),
        lambda: Stratified(Sentences(), labels=[number % 5 for number in range(37)]),
        lambda: iter_of(Sentences()),
    ],
    ids=["mixture", "strata", "stream"],
)
def test_every_kind_of_data_set_goes_along(dataset: Any, tmp_path: Path) -> None:
    """Samples are consumed once, and a run that begins again in the middle ends with the same bits."""
    main = partial(adaptive_mains.train, dataset=dataset())
    quiet: Trained = live(main)
    again: Trained = whole(partial(adaptive_mains.train, dataset=dataset()), tmp_path / "states", leaves_at=(3, 2))
    assert len(set(quiet.sizes)) > 1
    assert (again.digest, again.sizes, quiet.whole, again.whole) == (quiet.digest, quiet.sizes, True, True)


class iter_of:  # noqa: N801  # a stream over a data set, named as it is used
    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __iter__(self) -> Any:
        return (self.dataset[number] for number in range(len(self.dataset)))


def filled(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum of the losses of tokens that have a target, and their number."""
    total = nn.functional.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum")
    return total, (target >= 0).sum()


def test_packed_documents_go_along() -> None:
    """Packs are samples like any others."""
    tokens = [torch.arange(1 + number % 4) % VOCABULARY for number in range(90)]
    packed = Packed(tokens, length=LENGTH, positions=False)
    policy = Adaptive(8, 28, multiple=4, start=16, every=2, measured_every=1, memory=2)
    made: Trained = live(partial(adaptive_mains.train, policy=policy, dataset=packed, loss=filled))
    assert made.whole
    # All documents are alike, and so are their gradients.
    assert made.sizes[-1] < 16


def test_a_hole_is_no_part_of_what_is_measured() -> None:
    """A micro-batch that is left out shows nothing, and the others as many samples as they are."""
    made: Trained = live(partial(adaptive_mains.train, exclude=[(2, 4), (8, 16)]))
    assert made.whole
    # Step 1 is empty, so that nothing is decided after it.
    assert made.sizes[2] == 8
    assert made.sizes[-1] > 8


def test_measuring_seldom_is_enough() -> None:
    """Sizes change after steps in which nothing is measured, too; nothing but those steps shows a norm."""
    policy = Adaptive(8, 28, multiple=4, every=1, memory=2, measured_every=3)
    made: Trained = live(partial(adaptive_mains.train, policy=policy, clip=None))
    assert made.noise[0] == made.noise[1] == made.noise[2]
    assert made.sizes[:4] == (8, 8, 8, 8)
    assert made.sizes[4] > 8


def test_the_past_of_a_run_stays_and_its_future_is_the_scripts(tmp_path: Path) -> None:
    """Bounds may change; one size for all cannot follow several, but what they were can be said."""
    states = tmp_path / "states"
    states.mkdir()
    main = adaptive_mains.train
    assert live(partial(main, steps=8), keep=states, leave_at=6) is None
    with pytest.raises(StateError, match=r"global_batch=Growing\(\(0, 8\), \(2, 16\), \(4, 28\)\) and run.batches now"):
        live(partial(main, policy=8), take=states)
    with pytest.raises(StateError, match=r"global_batch=8 and run.batches now has 12"):
        live(partial(main, policy=Adaptive(12, 28, multiple=4)), take=states)
    fixed: Trained = live(partial(main, policy=Growing((0, 8), (2, 16), (4, 28))), take=states)
    assert (fixed.sizes[-2:], fixed.whole) == ((28, 28), True)
    less: Trained = live(partial(main, policy=Adaptive(8, 20, multiple=4, every=50)), take=states)
    assert (less.sizes, less.whole) == ((8, 8, 16, 16, 28, 28, 20, 20), True)
    assert less.changed[-1] == "the global batch is 20 after 28: the script says so"


def test_a_run_of_fixed_batches_may_become_adaptive(tmp_path: Path) -> None:
    """What it has consumed stays as it was."""
    states = tmp_path / "states"
    states.mkdir()
    assert live(partial(adaptive_mains.train, policy=Growing((0, 8), (2, 12))), keep=states, leave_at=3) is None
    made: Trained = live(adaptive_mains.train, take=states)
    assert made.sizes[:5] == (8, 8, 12, 12, 12)
    assert made.whole
    assert made.sizes[-1] > 12


def test_what_cannot_be_measured_is_refused() -> None:
    """Sums of the backend's own, and learning rates that are none; before the first step."""
    with pytest.raises(
        UsageError, match='measures the gradient of each micro-batch, but reduction="fast" has the back'
    ):
        live(partial(adaptive_mains.train, reduction="fast"))
    with pytest.raises(UsageError, match=r"multiplies learning rates, and group 0 of Odd has lr=None"):
        live(odd_rates)


class Odd(torch.optim.SGD):
    """An optimizer without a learning rate."""


def odd_rates(run: Run) -> None:
    model = run.shard(Middle)
    optimizer = Odd(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["lr"] = None
    batches = run.batches(points(), global_batch=Adaptive(8, 16, learning_rate="sqrt"), micro_batch=2)
    run.restore(model=model, optimizer=optimizer, batches=batches)


def spiky(
    port: Keeping, *, bad: Collection[int] = (), exclude: Sequence[tuple[int, int]] = ()
) -> tuple[str, Order, NoiseScale | None]:
    """Train a small model for 60 steps; WentBack if the run goes back. bad: samples whose targets are far off."""
    drawn = torch.randn(3_000, 6, generator=torch.Generator().manual_seed(1))
    samples = [(x, torch.full((2,), 90.0) if number in bad else x[:2]) for number, x in enumerate(drawn)]
    run = Run(port, tiers=KeepersAndStore(None))
    model = run.shard(lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)), seed=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    policy = Adaptive(
        4, 40, multiple=2, every=3, measured_every=1, memory=3, margin=0.01, most=1.5, learning_rate="adascale"
    )
    batches = run.batches(samples, global_batch=policy, micro_batch=2, seed=5, exclude=exclude)
    run.restore(model=model, optimizer=optimizer, batches=batches)
    for batch in batches.until(step=60):
        run.step(optimizer, loss=run.backward(model, batch, nn.functional.mse_loss), clip=1.0)
    assert check(run.ledger, batches.order, stop_step=60).whole
    return run.digest(), batches.order, run._control.noise


def watched(folder: Path) -> Keeping:
    """Return a port of a run that only says that its loss has jumped up."""
    port = Keeping(folder, 1)
    port.assignment = replace(port.assignment, spike="log")
    return port


def test_a_run_that_goes_back_for_a_spike_goes_back_to_its_noise(tmp_path: Path) -> None:
    """And ends with the sizes, the noise and the bits of a run that knew from its beginning what is left out."""
    _, order, _ = spiky(watched(tmp_path / "clean"))
    bad = {int(one) for one in order.samples(order.positions(45)[0], order.positions(49)[0])}
    with pytest.raises(WentBack) as ended:
        spiky(Keeping(tmp_path / "store", 1), bad=bad)
    report = ended.value.report
    assert report.rollback is not None
    hole = report.rollback.first, report.rollback.stop
    assert [step for step, _ in order.changes if report.rollback.step < step < report.rollback.spike]
    # Sizes depend on what was bad, so that only now it is known up to where.
    bad = {int(one) for one in order.samples(order.positions(45)[0], report.rollback.stop)}
    after = Keeping(tmp_path / "store", 2, go=following(report))
    assert spiky(after, bad=bad) == spiky(watched(tmp_path / "quiet"), bad=bad, exclude=[hole])
    assert after.source == "store"
    assert after.step < 45

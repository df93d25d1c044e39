"""Micro-batches cut by a budget of tokens: the same bits in every layout, whatever their number in a step is."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from elastic3d.data import Order, TokenBudget
from elastic3d.training import Run, run_alone
from elastic3d.values import Layout
from tests.parallel import budget_mains
from tests.parallel.budget_mains import Texts, Trained
from tests.parallel.models import VOCABULARY
from tests.parallel.worlds import Orders, run_world

pytestmark = pytest.mark.gloo

ALONE = Layout(pp=1, dp=1)


class Words(nn.Module):
    """A model in which no token has to do with another one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, 5), nn.Linear(5, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(self.embed(tokens))
        return scores


def made(main: Any, layout: Layout, **orders: Any) -> Trained:
    """Return what all ranks of a world came to."""
    reports = run_world(main, Orders(layout=layout, **orders))
    assert {report.ended for report in reports} == {"done"}, reports[0].error
    (result,) = {report.result for report in reports}
    assert isinstance(result, Trained)
    assert result.whole
    return result


@pytest.fixture(scope="module")
def alone() -> Trained:
    """The run of one rank, whose steps have several numbers of micro-batches."""
    result = made(budget_mains.train, ALONE)
    assert len(set(result.counts)) > 1
    return result


@pytest.mark.parametrize(
    "layout", [Layout(pp=1, dp=2, zero=2), Layout(pp=1, dp=3, zero=3), Layout(pp=2, dp=1, zero=3)], ids=str
)
def test_every_layout_ends_with_one_digest(alone: Trained, layout: Layout) -> None:
    """To the last bit of every loss, though the replicas divide the micro-batches of few steps.

    Stages pass on an activation of another shape for each micro-batch.
    """
    assert made(budget_mains.train, layout) == alone


def test_stages_pass_on_what_forward_computes_around_its_blocks() -> None:
    """Before the first block on the first stage, after the last one on the last, for every shape."""
    main = partial(budget_mains.train, build=budget_mains.Placed)
    assert made(main, Layout(pp=2, dp=1, zero=2)) == made(main, ALONE)


@pytest.mark.long
@pytest.mark.parametrize(
    "layout",
    [
        Layout(pp=1, dp=2, zero=1),
        Layout(pp=1, dp=4, zero=2, replicas=2),
        Layout(pp=1, dp=2, zero=2, shares=(1, 2)),
    ],
    ids=str,
)
def test_further_layouts_do_so_too(alone: Trained, layout: Layout) -> None:
    """Replicas of shards, and replicas with unequal shares."""
    assert made(budget_mains.train, layout) == alone


@pytest.mark.long
@pytest.mark.parametrize("replicas", [1, 2])
def test_steps_may_have_fewer_micro_batches_than_there_are_replicas(replicas: int) -> None:
    """Those without one only take part, and no bit depends on them."""
    main = partial(budget_mains.train, budget=TokenBudget(150))
    one = made(main, ALONE)
    assert min(one.counts) < 4
    assert made(main, Layout(pp=1, dp=4, zero=2, replicas=replicas)) == one


@pytest.mark.long
@pytest.mark.parametrize("choice", ["leaf", "sums", "exclude", "alone"])
def test_every_choice_that_has_the_same_bits_has_them_here(choice: str) -> None:
    """Leaves, losses that are sums over tokens, samples that are left out, texts above the budget."""
    choices: dict[str, dict[str, Any]] = {
        "leaf": {"leaf": 2, "budget": TokenBudget(budget_mains.TOKENS, multiple=2)},
        "sums": {"summed": True},
        "exclude": {"exclude": [(17, 28), (29, 30)]},
        "alone": {"budget": TokenBudget(10, too_long="alone")},
    }
    main = partial(budget_mains.train, **choices[choice])
    assert made(main, Layout(pp=1, dp=2, zero=2)) == made(main, ALONE)


@pytest.mark.long
def test_audited_steps_have_the_same_bits() -> None:
    """Micro-batches of several sizes are computed twice, and compared; a multiple gives each replica one."""
    main = partial(budget_mains.train, budget=TokenBudget(budget_mains.TOKENS, multiple=2))
    audited = Orders(layout=Layout(pp=1, dp=2, zero=2), audit=1.0, at_rest=1.0)
    reports = run_world(main, audited)
    assert {report.result for report in reports} == {made(main, ALONE)}, reports[0].error
    assert all(report.coverage is not None and report.coverage.every for report in reports)


def test_a_run_goes_on_in_another_layout(alone: Trained, tmp_path: Path) -> None:
    """In the middle of an epoch, from the state of two replicas, by one; then by three, and by two stages."""
    before = Orders(layout=Layout(pp=1, dp=2, zero=3), keep=tmp_path, snapshot_every=1, leave_at={0: 2, 1: 2})
    assert {report.ended for report in run_world(budget_mains.train, before)} == {"left"}
    for layout in (ALONE, Layout(pp=1, dp=3, zero=2), Layout(pp=2, dp=1, zero=2)):
        later = made(budget_mains.train, layout, take=tmp_path)
        assert (later.digest, later.counts) == (alone.digest, alone.counts)
        assert later.losses == alone.losses[-len(later.losses) :]


def test_the_gradient_is_that_of_the_whole_global_batch() -> None:
    """Of the mean over its samples where a loss is a mean over samples, and over its tokens where it is (sum, number).

    The same for every budget, and as plain torch computes it of all samples at once.
    """

    def gradients(budget: TokenBudget, *, tokens: bool) -> list[torch.Tensor]:
        taken: list[torch.Tensor] = []

        def main(run: Run) -> None:
            model = run.shard(Words, seed=3)
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            optimizer.register_step_pre_hook(lambda *_: taken.extend(_gradients(model)))
            batches = run.batches(Texts(), global_batch=16, micro_batch=budget, seed=11, collate=_padded)
            run.restore(model=model, optimizer=optimizer, batches=batches)
            for batch in batches.until(step=1):
                run.step(optimizer, loss=run.backward(model, batch, budget_mains.sums if tokens else _by_text))

        run_alone(main, threads=1)
        return taken

    def plain(*, tokens: bool) -> list[torch.Tensor]:
        torch.manual_seed(3)
        model = Words()
        order = Order(length=len(Texts()), global_batch=16, micro_batch=16, seed=11)
        batch = _padded([Texts()[sample] for sample in order.micro_batch_samples(0, 0)])
        output = model(batch["tokens"])
        total, number = budget_mains.sums(output, batch["labels"])
        loss = total / number if tokens else _by_text(output, batch["labels"])
        loss.backward()  # type: ignore[no-untyped-call]
        return _gradients(model)

    for tokens in (False, True):
        expected = plain(tokens=tokens)
        for size in (12, 24, 60):
            for a, b in zip(gradients(TokenBudget(size), tokens=tokens), expected, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def _gradients(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def _padded(samples: list[Any]) -> dict[str, torch.Tensor]:
    longest = max(len(one["tokens"]) for one in samples)
    return {
        name: torch.tensor([one[name] + [filler] * (longest - len(one[name])) for one in samples])
        for name, filler in (("tokens", 0), ("labels", -100))
    }


def _by_text(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    losses = nn.functional.cross_entropy(output.transpose(1, 2), target, reduction="none")
    return (losses.sum(1) / (target != -100).sum(1)).mean()


FOURS = partial(budget_mains.train, budget=TokenBudget(budget_mains.TOKENS, multiple=4))
"""Each of two pipelines has two micro-batches, or a multiple of two."""


@pytest.fixture(scope="module")
def in_fours() -> Trained:
    """The run of one rank whose steps have four micro-batches, or eight."""
    result = made(FOURS, ALONE)
    assert set(result.counts) == {4, 8}
    return result


def test_a_run_goes_on_in_other_stages(in_fours: Trained, tmp_path: Path) -> None:
    """Two pipelines of two stages, then another two after two steps, and one rank."""
    before = Orders(layout=Layout(pp=2, dp=2), keep=tmp_path, snapshot_every=1, leave_at=dict.fromkeys(range(4), 2))
    assert {report.ended for report in run_world(FOURS, before)} == {"left"}
    for layout in (Layout(pp=2, dp=2, zero=2, replicas=2), ALONE):
        later = made(FOURS, layout, take=tmp_path)
        assert (later.digest, later.counts) == (in_fours.digest, in_fours.counts)


@pytest.mark.long
@pytest.mark.parametrize(
    "text",
    [
        "pp=2,dp=1,schedule=gpipe,cuts=3",
        "pp=2,dp=2,schedule=interleaved,virtual=2",
        "pp=2,dp=2,zero=2,schedule=zero-bubble,virtual=2",
        "pp=2,dp=2,zero=2,schedule=zbv,virtual=2",
        "pp=2,dp=1,zero=2,schedule=dualpipev,virtual=2",
    ],
)
def test_every_schedule_ends_with_one_digest(in_fours: Trained, text: str) -> None:
    """Those whose first rank has the last stage too, and those that compute gradients of weights later."""
    assert made(FOURS, Layout.parse(text)) == in_fours


@pytest.mark.long
def test_texts_of_several_lengths_are_evaluated_through_stages() -> None:
    """The same number as one rank comes to."""
    (one,) = run_world(budget_mains.evaluate, Orders(layout=ALONE))
    assert one.ended == "done", one.error
    staged = run_world(budget_mains.evaluate, Orders(layout=Layout(pp=2, dp=1)))
    assert [report.result for report in staged] == [one.result] * 2, staged[0].error


@pytest.mark.long
def test_a_stage_whose_activation_is_not_as_expected_is_named() -> None:
    """Only long texts are cropped, of which the first step has none: no receiver gets what it has no room for."""
    reports = run_world(budget_mains.crop, Orders(layout=Layout(pp=2, dp=1)))
    assert reports[0].ended == "raised"
    assert "stage 0 made an activation of shape [2, 10, 7], and the next stage expects [2, 12, 7]" in reports[0].error
    assert len(reports[0].records) == 1

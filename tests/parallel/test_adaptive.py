"""Sizes of the global batch that follow the gradient's noise, with the same bits in every layout."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from elastic3d.values import Layout, Schedule
from tests.parallel import adaptive_mains, tensors, unsound_mains
from tests.parallel.adaptive_mains import Trained
from tests.parallel.models import Sentences
from tests.parallel.worlds import Orders, run_world

pytestmark = pytest.mark.gloo

ALONE = Layout(pp=1, dp=1)


def made(main: Any, layout: Layout, **orders: Any) -> Trained:
    """Return what all ranks of a world came to."""
    reports = run_world(main, Orders(layout=layout, **orders))
    assert {report.ended for report in reports} == {"done"}, reports[0].error
    (result,) = {report.result for report in reports}
    assert isinstance(result, Trained)
    return result


@pytest.fixture(scope="module")
def alone() -> Trained:
    """The run of one rank, whose batches change twice."""
    result = made(adaptive_mains.train, ALONE)
    assert len(set(result.sizes)) == 3
    return result


@pytest.mark.parametrize(
    "layout",
    [
        Layout(pp=2, dp=2, zero=2),
        Layout(pp=1, dp=2, zero=2, shares=(1, 2)),
    ],
    ids=str,
)
def test_every_layout_measures_and_decides_alike(alone: Trained, layout: Layout) -> None:
    """To the last bit of the noise scale: sizes, learning rates, weights, and the account of the samples."""
    assert made(adaptive_mains.train, layout) == alone


@pytest.mark.long
@pytest.mark.parametrize(
    "layout",
    [
        Layout(pp=4, dp=1),
        Layout(pp=1, dp=3, zero=3),
        Layout(pp=1, dp=4, zero=1),
        Layout(pp=1, dp=4, zero=2, replicas=2),
        Layout(pp=2, dp=2, zero=3),
        Layout(pp=2, dp=1, virtual=2, schedule=Schedule.INTERLEAVED),
        Layout(pp=2, dp=2, virtual=2, schedule=Schedule.ZBV, zero=2),
    ],
    ids=str,
)
def test_further_layouts_do_so_too(alone: Trained, layout: Layout) -> None:
    """Replicas, schedules with several stages a rank, and those that compute gradients of weights apart."""
    assert made(adaptive_mains.train, layout) == alone


@pytest.mark.long
@pytest.mark.parametrize("choice", ["leaf", "tokens", "bf16", "fp16", "unclipped"])
def test_every_choice_that_has_the_same_bits_has_them_here(choice: str) -> None:
    """Leaves, losses that are sums over tokens, 16 bits, and steps of which only the measuring wants a norm."""
    choices: dict[str, dict[str, Any]] = {
        "leaf": {"leaf": 2},
        "tokens": {"tokens": True},
        "bf16": {"precision": "bf16"},
        "fp16": {"precision": "fp16"},
        "unclipped": {"clip": None},
    }
    main = partial(adaptive_mains.train, **choices[choice])
    one = made(main, ALONE)
    assert len(set(one.sizes)) > 1
    assert made(main, Layout(pp=2, dp=2, zero=2)) == one


@pytest.mark.long
def test_ranks_of_a_tensor_group_measure_their_parts() -> None:
    """For a fixed tp the same bits; and for another one the same noise, as near as its own sums are."""
    main = partial(
        adaptive_mains.train,
        build=partial(tensors.Decoder, 0.0),
        tensor=tensors.SEQUENCE,
        dataset=Sentences(tensors.VOCABULARY, tensors.LENGTH),
    )
    whole = made(main, ALONE)
    cut = made(main, Layout(pp=1, dp=1, tp=2))
    assert made(main, Layout(pp=1, dp=2, tp=2, zero=2)) == cut
    assert cut.sizes == whole.sizes
    known = [(one, other) for one, other in zip(whole.noise, cut.noise, strict=True) if one is not None]
    assert all(one == pytest.approx(other, rel=1e-3) for one, other in known)


def test_a_run_goes_on_in_another_layout(alone: Trained, tmp_path: Path) -> None:
    """From the state after which a change was decided, and from the one before that decision."""
    before = Orders(layout=Layout(pp=1, dp=2, zero=3), keep=tmp_path, snapshot_every=1, leave_at={0: 1, 1: 1})
    assert {report.ended for report in run_world(adaptive_mains.train, before)} == {"left"}
    later = made(adaptive_mains.train, Layout(pp=2, dp=1), take=tmp_path)
    assert (later.digest, later.sizes, later.whole) == (alone.digest, alone.sizes, True)
    assert later.noise == alone.noise[2:]
    assert list(filter(None, later.changed)) == list(filter(None, alone.changed))
    (tmp_path / "2.1.0").unlink()
    (tmp_path / "2.1.1").unlink()
    assert made(adaptive_mains.train, ALONE, take=tmp_path).noise == alone.noise[1:]


@pytest.mark.long
def test_what_is_not_finite_is_not_measured() -> None:
    """Samples that are left out as they come: the same sizes and bits as of a run that knew of them."""
    marks = ((5, unsound_mains.LOSS), (20, unsound_mains.GRADIENT), (30, unsound_mains.LOSS))
    poisoned = unsound_mains.Poisoned(dict(marks))
    main = partial(adaptive_mains.train, dataset=poisoned, loss=unsound_mains.poisoned_loss)
    found = made(main, Layout(pp=1, dp=2, zero=2), numerics="skip")
    assert len(found.holes) >= 2
    assert len(set(found.sizes)) > 1
    assert made(partial(main, exclude=found.holes), ALONE, numerics="skip") == found


@pytest.mark.long
def test_audited_steps_measure_each_micro_batch_once(alone: Trained) -> None:
    """Those that ranks repeat for each other do not count a second time."""
    assert made(adaptive_mains.train, Layout(pp=1, dp=2, zero=2), audit=1.0, at_rest=1.0) == alone

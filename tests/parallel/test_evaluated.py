"""Metrics of a data set that is evaluated between steps, on real ranks."""

from __future__ import annotations

import math
from functools import cache, partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic3d.training.evaluating import ExactSum
from elastic3d.values import Layout, Schedule
from tests.parallel import evaluated_mains, logged_mains, tensors
from tests.parallel.models import Model
from tests.parallel.worlds import Orders, Report, run_world

pytestmark = pytest.mark.gloo

QUIET = partial(logged_mains.log_nothing, global_batch=evaluated_mains.GLOBAL_BATCH)
V = Layout(pp=2, dp=2, zero=2, schedule=Schedule.ZBV, virtual=2)


@cache
def alone() -> tuple[str, list[float], bool]:
    (report,) = ended(run_world(evaluated_mains.evaluate, Orders(layout=Layout(pp=1, dp=1))))
    result: tuple[str, list[float], bool] = report.result
    return result


def ended(reports: list[Report]) -> list[Report]:
    for report in reports:
        assert report.ended == "done", report.error
    return reports


@pytest.mark.parametrize(
    "layout",
    [
        Layout(pp=1, dp=2, zero=1),
        Layout(pp=2, dp=1),
        pytest.param(Layout(pp=1, dp=3, zero=3), marks=pytest.mark.slow),
        pytest.param(Layout(pp=1, dp=4, replicas=2), marks=pytest.mark.slow),
        pytest.param(Layout(pp=2, dp=1, schedule=Schedule.INTERLEAVED, virtual=2), marks=pytest.mark.slow),
        pytest.param(V, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_metric_is_the_same_number_in_every_layout(layout: Layout) -> None:
    """And on every rank; what is trained does not depend on it."""
    (quiet,) = ended(run_world(QUIET, Orders(layout=Layout(pp=1, dp=1))))
    assert alone()[0] == quiet.result
    for report in ended(run_world(evaluated_mains.evaluate, Orders(layout=layout))):
        assert report.result == alone()


@pytest.mark.long
@pytest.mark.parametrize(
    ("choices", "one", "other"),
    [
        ({"plan": tensors.SEQUENCE}, "pp=1,dp=1,tp=2", "pp=2,dp=1,tp=2"),
        ({"precision": "bf16"}, "pp=1,dp=1", "pp=1,dp=2"),
        pytest.param({"plan": tensors.WHOLE}, "pp=1,dp=2,tp=2", "pp=2,dp=2,tp=2", marks=pytest.mark.slow),
        pytest.param({"precision": "bf16"}, "pp=1,dp=1", "pp=2,dp=2", marks=pytest.mark.slow),
    ],
    ids=["tensor parallel", "bf16", "whole activations", "bf16 in stages"],
)
def test_layers_that_are_cut_and_16_bits_evaluate_alike(choices: dict[str, Any], one: str, other: str) -> None:
    """For one tp, and on every rank of a tensor group."""
    main, layouts = partial(evaluated_mains.evaluate_parts, **choices), [Layout.parse(text) for text in (one, other)]
    results = {str(report.result) for layout in layouts for report in ended(run_world(main, Orders(layout=layout)))}
    assert len(results) == 1


@pytest.mark.slow
def test_experts_that_are_spread_evaluate_too() -> None:
    """Without the promise of equal bits; a replica without a micro-batch runs one for the others' experts."""
    first, *others = (
        report.result
        for dp in (1, 2)
        for report in ended(run_world(evaluated_mains.evaluate_experts, Orders(layout=Layout(pp=1, dp=dp))))
    )
    assert others == [pytest.approx(first, rel=1e-4)] * 2


def test_a_metric_is_that_of_the_whole_model() -> None:
    """Of each sample once, though the last micro-batch is filled up; it changes with each update."""
    torch.manual_seed(3)
    model = Model().eval()
    inputs, targets = (torch.stack(column) for column in zip(*evaluated_mains.HELD_OUT, strict=True))
    with torch.no_grad():
        sums, counts = evaluated_mains.losses(model(inputs), targets)
    _, values, training = alone()
    assert values[0] == pytest.approx(float(sums.double().sum() / counts.double().sum()), rel=1e-6)
    assert values[1] == pytest.approx(float(counts[0]) * values[2], rel=1e-9)
    assert len(set(values)) == len(values)
    assert training


def test_what_is_no_metric_is_refused() -> None:
    """On every rank alike where it is the call, and by name."""
    words = ["map-style", "map-style", "shape []", "returned float", "draws from", "1 or more", "between run.b"]
    (report,) = ended(run_world(evaluated_mains.evaluate_wrongly, Orders(layout=Layout(pp=1, dp=1))))
    for message, word in zip(report.result, words, strict=True):
        assert word in message


NUMBERS = st.lists(st.floats(allow_nan=False), max_size=6)


@given(NUMBERS, NUMBERS, st.lists(st.floats(0.5, 4.0), min_size=1, max_size=3))
def test_sums_are_exact_however_they_are_spread(one: list[float], other: list[float], weights: list[float]) -> None:
    """What overflows is infinite, what has no value is NaN, and nothing raises."""
    spread, whole, weight = ExactSum(), ExactSum(), ExactSum()
    for part in (one, other):
        ours = ExactSum()
        ours.add(part)
        spread.join(ours.to_json())
    whole.add([*other, *one])
    weight.add(weights)
    result = spread.over(weight)
    assert str(result) == str(whole.over(weight))
    if all(map(math.isfinite, [*one, *other])) and math.isfinite(result) and weights == [1.0]:
        assert result == math.fsum([*one, *other])


def test_a_mean_of_what_is_not_finite_is_not_finite() -> None:
    """As with floats; of nothing there is none."""

    def mean(*values: float, weights: tuple[float, ...] = (1.0, 1.0)) -> float:
        total, weight = ExactSum(), ExactSum()
        total.add(values)
        weight.add(weights)
        return total.over(weight)

    assert (mean(math.inf, 1.0), mean(-math.inf, 1.0), mean(1e308, 1e308)) == (math.inf, -math.inf, 1e308)
    assert mean(1.7e308, 1.7e308, weights=(0.5,)) == math.inf
    assert all(map(math.isnan, [mean(math.nan, 1.0), mean(math.inf, -math.inf), mean(1.0, weights=())]))
    assert math.isnan(mean(1.0, weights=(math.inf,)))

"""Experts distributed over data-parallel ranks."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from elastic3d.errors import LayoutError, ModelError
from elastic3d.parallel.experts import Experts, Top2
from elastic3d.parallel.experts import spread as experts
from elastic3d.parallel.numerics.precision import Precision
from elastic3d.parallel.refusals import OutsidePromise
from elastic3d.values import Layout, Schedule
from tests.parallel.architectures import mixtures
from tests.parallel.worlds import Orders, Report, run_world

pytestmark = pytest.mark.long

PATTERN = "blocks.*.mlp.experts"


def trained(kind: str, pp: int, dp: int, ended: str = "done", **orders: object) -> list[Report]:
    reports = run_world(mixtures.trainer(kind), Orders(layout=Layout(pp=pp, dp=dp), **orders))  # type: ignore[arg-type]
    assert {report.ended for report in reports} == {ended}, "\n".join(report.error for report in reports)
    return reports


@pytest.mark.gloo
def test_losses_do_not_depend_on_the_distribution_of_experts() -> None:
    """One process, two and four replicas and two stages train alike, and each expert is on one replica."""
    alone = trained("own", 1, 1)[0].result
    for pp, dp in [(1, 2), (1, 4), (2, 2)]:
        reports = trained("own", pp, dp)
        for report in reports:
            assert report.result[0] == pytest.approx(alone[0], abs=1e-5), (pp, dp)
        assert sorted(name for report in reports for name in report.result[1]) == sorted(alone[1])
        assert len({report.result[3] for report in reports}) == 1


@pytest.mark.gloo
def test_full_and_unused_experts_change_nothing() -> None:
    """Capacity is counted per micro-batch, and an expert without tokens has no gradient on any rank."""
    for kind in ("tight", "cold"):
        alone = trained(kind, 1, 1)[0].result
        reports = trained(kind, 1, 2)
        for report in reports:
            assert report.result[0] == pytest.approx(alone[0], abs=1e-5), kind
        # Not even by weight decay, which an expert with a zero gradient would get.
        assert sorted(name for report in reports for name in report.result[2]) == sorted(alone[2])
        assert any(".experts.3." in name for name in alone[2]) == (kind == "tight")


@pytest.mark.gloo
def test_transformers_experts_are_distributed_by_rows() -> None:
    """Mixtral keeps all experts of a layer in two parameters; its own router and its own products are used."""
    alone = trained("mixtral", 1, 1)[0].result
    for report in trained("mixtral", 1, 2):
        assert report.result[0] == pytest.approx(alone[0], abs=1e-5)


@pytest.mark.gloo
def test_experts_move_when_dp_changes(tmp_path: Path) -> None:
    """The experts of four replicas are restored on one and on two, with their optimizer state."""
    alone = trained("own", 1, 1)[0].result
    trained("own", 1, 4, ended="left", keep=tmp_path, leave_at=dict.fromkeys(range(4), 2))
    for dp in (1, 2):
        for report in trained("own", 1, dp, take=tmp_path):
            assert report.result[0] == pytest.approx(alone[0][3:], abs=1e-5)


@pytest.mark.gloo
def test_foreach_updates_of_experts_and_shards_are_refused() -> None:
    """torch's foreach updates do not mix plain tensors and shards."""
    reports = run_world(mixtures.trainer("own", foreach=True), Orders(layout=Layout(pp=1, dp=2)))
    assert all("foreach=True) cannot update experts together with sharded" in report.error for report in reports)


def test_experts_that_cannot_be_distributed_are_named() -> None:
    """Other kinds of modules, uneven shares, and combinations that were not proved."""
    with torch.device("meta"):
        model = mixtures.Mixture()
    with pytest.raises(ModelError, match="no such module in Mixture"):
        experts.find(model, "blocks.*.experts")
    with pytest.raises(ModelError, match=r"'blocks.0.mlp' \(Top2\) cannot be spread"):
        experts.find(model, "blocks.*.mlp")
    for layout, message in [
        (Layout(pp=1, dp=3), "the 4 experts of 'blocks.0.mlp.experts' cannot be spread evenly over dp=3"),
        (Layout(pp=1, dp=2, tp=2), "needs tp 1"),
        (Layout(pp=2, dp=2, zero=2, schedule=Schedule.ZERO_BUBBLE), "zero-bubble has not been proved"),
    ]:
        with pytest.warns(OutsidePromise, match="the bits depend on dp"), pytest.raises(LayoutError, match=message):
            experts.check(model, PATTERN, layout, Precision.FP32)
    with pytest.warns(OutsidePromise), pytest.raises(LayoutError, match="leave precision at fp32"):
        experts.check(model, PATTERN, Layout(pp=1, dp=2), Precision.BF16)


def test_tokens_beyond_capacity_are_dropped() -> None:
    """First choices come first, then tokens in order; the output is the weighted sum of what was computed."""

    class Constant(nn.Module):
        def __init__(self, value: float) -> None:
            super().__init__()
            self.value = nn.Parameter(torch.tensor([value]))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.value.expand_as(x)

    layer = Top2(1, [Constant(1.0), Constant(10.0), Constant(100.0)], capacity=0.5)
    layer.gate.weight.data = torch.tensor([[2.0], [1.0], [-5.0]])
    # Capacity: ceil(2 * 3 / 3 * 0.5) = 1, so the first token has both its experts, and the others none.
    out = layer(torch.ones(3, 1)).flatten().tolist()
    first = float(torch.tensor([2.0, 1.0]).softmax(0)[0])
    assert out == pytest.approx([first + 10 * (1 - first), 0.0, 0.0], rel=1e-4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Experts([nn.Linear(2, 2)])(torch.ones(2, 2), torch.ones(2, 1, dtype=torch.long), torch.ones(2, 1)).equal(
            torch.zeros(2, 2)
        )
